/* stand_in_float.h - f16 and bf16 conversions for the stand-ins, which do not link luatrain. */
#ifndef TESTS_CUDA_STAND_IN_FLOAT_H
#define TESTS_CUDA_STAND_IN_FLOAT_H

#include <stdint.h>

static inline double of_bf16(uint16_t bits)
{
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)bits << 16};
    return v.f;
}

static inline uint16_t to_bf16(float f)
{
    union {
        float f;
        uint32_t u;
    } v = {f};
    if (f != f)
        return 0x7fff;
    return (uint16_t)((v.u + 0x7fff + (v.u >> 16 & 1)) >> 16);
}

static inline double of_f16(uint16_t bits)
{
    union {
        uint16_t u;
        _Float16 f;
    } v = {bits};
    return (double)v.f;
}

static inline uint16_t to_f16(float f)
{
    union {
        _Float16 f;
        uint16_t u;
    } v = {(_Float16)f};
    return v.u;
}

#endif
