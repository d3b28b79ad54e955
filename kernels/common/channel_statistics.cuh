// Channel statistics: sums of x and of x², from which a norm computes mean and variance.
//
// The kernel that computes x stores an array (N, tiles, C) of one of these structs: for each tile of an image's pixels, the
// sums of each channel. From raw sums the variance is a difference, which cancels where the mean is many standard deviations.
// 16-bit x has few digits to lose, so that its sums are raw. Those of float x, and of the norms' own passes, are centred.
#pragma once
#include "common.cuh"

struct __align__(8) RawStatistics {
    float sum, square;
    __device__ __forceinline__ void add(float x) { sum += x, square += x * x; }
    __device__ __forceinline__ void add(const RawStatistics& other) { sum += other.sum, square += other.square; }
    __device__ __forceinline__ double2 raw() const { return make_double2(sum, square); }
};

// Sums of x - centre and of (x - centre)² over `count` pixels. The centre is x of one of the pixels.
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

// The sums of lane ^ mask.
__device__ __forceinline__ RawStatistics shuffle(const RawStatistics& own, int mask) {
    return {__shfl_xor_sync(~0u, own.sum, mask), __shfl_xor_sync(~0u, own.square, mask)};
}
__device__ __forceinline__ CentredStatistics shuffle(const CentredStatistics& own, int mask) {
    return {__shfl_xor_sync(~0u, own.count, mask), __shfl_xor_sync(~0u, own.centre, mask), __shfl_xor_sync(~0u, own.sum, mask),
            __shfl_xor_sync(~0u, own.square, mask)};
}

// The struct for x of type S. moments() in cudiff/statistics.py follows the same rule.
template <typename S> struct StatisticsOf {
    typedef RawStatistics Type;
    static constexpr bool CENTRED = false;
};
template <> struct StatisticsOf<float> {
    typedef CentredStatistics Type;
    static constexpr bool CENTRED = true;
};
