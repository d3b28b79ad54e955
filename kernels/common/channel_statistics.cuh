// Channel statistics: the sums of x and of its square by which a norm finds mean and variance.
//
// A producer leaves them as (N, tiles, C) of either struct, one for each channel of a tile of an image's pixels. The variance
// is a difference of raw sums, which lose digits where the mean is many deviations. Raw ones are left of 16-bit x, which has
// few digits to lose; centred ones of float x, and by the norms' own passes.
#pragma once
#include "common.cuh"

struct __align__(8) RawStatistics {
    float sum, square;
    __device__ __forceinline__ void add(float x) { sum += x, square += x * x; }
    __device__ __forceinline__ void add(const RawStatistics& other) { sum += other.sum, square += other.square; }
    __device__ __forceinline__ double2 raw() const { return make_double2(sum, square); }
};

// Sums of x - centre and of its square over `count` pixels; the centre is some pixel's x.
struct __align__(16) CentredStatistics {
    float count, centre, sum, square;
    __device__ __forceinline__ void add(float x) {
        if (count == 0.0f) centre = x;
        float gap = x - centre;
        count += 1.0f, sum += gap, square += gap * gap;
    }
    __device__ __forceinline__ void add(const CentredStatistics& other) {
        if (count == 0.0f) centre = other.centre;
        float gap = other.centre - centre, moved = other.count * gap;
        square += other.square + gap * (2.0f * other.sum + moved);
        sum += other.sum + moved;
        count += other.count;
    }
    __device__ __forceinline__ double2 raw() const {
        double c = centre, moved = count * c;
        return make_double2(sum + moved, square + c * (2.0 * sum + moved));
    }
};

// What is left of x of type S; empty_partials() in cudiff/cuda/sums.py has the same rule.
template <typename S> struct StatisticsOf {
    typedef RawStatistics Type;
    static constexpr bool CENTRED = false;
};
template <> struct StatisticsOf<float> {
    typedef CentredStatistics Type;
    static constexpr bool CENTRED = true;
};
