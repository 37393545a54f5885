/* ids.h - what is said of an integer that names nothing: its place, it, and how many there are. */
#ifndef LT_OPS_IDS_H
#define LT_OPS_IDS_H

#define LT_BAD_LABEL_TEXT "labels[%lld] is %lld, x has %lld classes (labels count from 0)"
#define LT_BAD_ROW_TEXT "ids[%lld] is %lld, w has %lld rows (ids count from 0)"

#endif
