/* ids.h - the messages for labels and ids that are out of range, for the CPU and CUDA. The
 * arguments, each a long long, are the position of the label or id, from 1, its value, and the
 * number of classes or rows. */
#ifndef LT_OPS_IDS_H
#define LT_OPS_IDS_H

#define LT_BAD_LABEL_TEXT "label number %lld is %lld, but x has %lld classes (labels start at 0)"
#define LT_BAD_ROW_TEXT "id number %lld is %lld, but w has %lld rows (ids start at 0)"

#endif
