/* list.h - the only list of all ops. The library registers them in this order, and plugin.h numbers
 * a plugin's kernels in the same order. A name here is the op's name in scripts. The op's
 * definition is the constant lt__op_NAME in the file that the comment names. */
#ifndef LT_OPS_LIST_H
#define LT_OPS_LIST_H

/* clang-format off */
#define LT_OP_LIST(X)                                                                              \
    X(add) X(sub) X(mul) X(div) X(floor_divide) X(pow)                        /* binary.c */       \
    X(eq) X(ne) X(lt) X(le) X(gt) X(ge) X(where)                              /* compare.c */      \
    X(neg) X(exp) X(log) X(sqrt) X(abs) X(clamp)                              /* unary.c */        \
    X(relu) X(relu6) X(sigmoid) X(tanh) X(gelu) X(silu)                                            \
    X(sum) X(mean) X(max) X(min) X(argmax) X(norm)                            /* reduce.c */       \
    X(reshape) X(transpose) X(permute) X(cat) X(slice) X(pad) X(cast)         /* shape.c */        \
    X(matmul) X(linear)                                                       /* matmul.c */       \
    X(conv2d)                                                                 /* conv2d.c */       \
    X(max_pool2d) X(avg_pool2d) X(global_avg_pool2d)                          /* pool2d.c */       \
    X(batch_norm) X(batch_norm_merge) X(batch_norm_update)                    /* batch_norm.c */   \
    X(layer_norm)                                                             /* layer_norm.c */   \
    X(group_norm)                                                             /* group_norm.c */   \
    X(dropout)                                                                /* dropout.c */      \
    X(embedding)                                                              /* embedding.c */    \
    X(softmax) X(log_softmax) X(cross_entropy)                                /* softmax.c */      \
    X(mse_loss)                                                               /* loss.c */         \
    X(add_squares) X(sgd_step) X(momentum_step) X(lars_step) X(adam_step)     /* update.c */     \
    X(dc_grad) X(gap_grad) X(ddc_step) X(ordered_step)                        /* delay.c */
/* clang-format on */

#endif
