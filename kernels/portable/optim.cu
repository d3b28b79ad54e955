// The optimiser: the gradient's norm and the scalars of a step, and AdamW, Adam, SGD, RMSprop and Lion over flat buffers.
//
//   data, grad, moments, ema   float. data, moments and ema are updated in place; grad is only read. ema, the moving average of
//                              data, may be null.
//   compute_copy, ema_copy     T copies of data and ema, overwritten, or null.
//   peers                      other GPUs, to which the new values are written too, and whose gradients lie here.
//   flags                      u8, one for 32 elements. DECAY: weight decay applies. FROZEN: nothing changes, not even ema.
//   scalars                    floats in the order of Scalar. `step_scalars` writes them and the updates read them, so that no
//                              launch argument changes from step to step. Where scalars[APPLY] is 0, an update changes nothing.
// Flat buffers have n elements, n a multiple of 32, and start at multiples of 16 bytes. All sums are in a fixed order.
// Launch: square_sums and step_scalars THREADS threads; rescale and unscale one block; the updates any block, 4 elements a
// thread, grid = ceil(n / 4 / block).
#include "reduce.cuh"

constexpr int THREADS = 256;  // of square_sums and step_scalars
enum Scalar { LR, GRAD_SCALE, STEP_SIZE, RSQRT_BIAS2, EMA_WEIGHT, NORM, APPLY };
enum Flag { DECAY = 1, FROZEN = 2 };
enum Counter { UPDATES, SKIPPED, SKIPPED_IN_A_ROW };

// Of each of `count` other GPUs: where data lies in its memory, and where its gradient of the same elements lies in this one's.
struct Peers { float* data[7]; const float* grads[7]; i64 count; };

// Adds the other GPUs' gradients of four elements. Unrolled, else the addresses are copied to local memory.
__device__ __forceinline__ void add_gradients(Pack<float>& g, const Peers& peers, i64 i) {
    if (peers.count == 0) return;
#pragma unroll
    for (int other = 0; other < 7; other++)
        if (other < peers.count) {
            Pack<float> term = load_pack(peers.grads[other] + i);
#pragma unroll
            for (int k = 0; k < 4; k++) g.v[k] += term.v[k];
        }
}

// The sum of this thread's squares of elements start to stop.
template <bool SEVERAL> __device__ __forceinline__
float sum_of_squares(const float* grad, const Peers& peers, i64 start, i64 stop) {
    float sum = 0.0f;
#pragma unroll 4
    for (i64 i = start + threadIdx.x * 4; i < stop; i += THREADS * 4) {
        Pack<float> g = load_pack(grad + i);
        if (SEVERAL) add_gradients(g, peers, i);
#pragma unroll
        for (int k = 0; k < 4; k++) sum += g.v[k] * g.v[k];
    }
    return sum;
}

// Block i: sums[i] = the sum of squares of the elements i·chunk to (i + 1)·chunk of grad. chunk is a multiple of 4.
extern "C" __global__ void square_sums(const float* __restrict__ grad, Peers peers, float* __restrict__ sums, i64 n, int chunk) {
    wait_for_previous();
    i64 start = (i64)blockIdx.x * chunk, stop = start + chunk < n ? start + chunk : n;
    // No branch in the loop: then the compiler loads several rounds at once.
    bool several = peers.count > 0;
    float sum = several ? sum_of_squares<true>(grad, peers, start, stop) : sum_of_squares<false>(grad, peers, start, stop);
    sum = block_reduce<Sum>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// The scalars and counters of a step, from `count` sums of the gradient's squares: one block. In double, because 1 - beta^t
// cancels. log_beta may be -infinity. ramp < 0: the half-life of ema is constant.
extern "C" __global__ void step_scalars(const float* __restrict__ squares, float* __restrict__ scalars,
                                        int* __restrict__ counters, int count, double lr, int warmup, int total_steps,
                                        double final, double log_beta1, double log_beta2, double scale, double clip,
                                        double half_life, double ramp) {
    wait_for_previous();
    __shared__ double sums[THREADS];
    double total = 0.0;
#pragma unroll 8
    for (int i = threadIdx.x; i < count; i += THREADS) total += (double)squares[i];
    sums[threadIdx.x] = total;
    for (int half_width = THREADS / 2; half_width > 0; half_width >>= 1) {
        __syncthreads();
        if (threadIdx.x < half_width) sums[threadIdx.x] += sums[threadIdx.x + half_width];
    }
    if (threadIdx.x > 0) return;

    double grad_norm = scale * sqrt(sums[0]);
    double step = (double)counters[UPDATES] + counters[SKIPPED];
    bool apply = isfinite(grad_norm);
    counters[UPDATES] += apply;
    counters[SKIPPED] += !apply;
    counters[SKIPPED_IN_A_ROW] = apply ? 0 : counters[SKIPPED_IN_A_ROW] + 1;

    double t = counters[UPDATES] > 0 ? counters[UPDATES] : 1;
    double rise = warmup > 0 ? fmin(1.0, (step + 1.0) / warmup) : 1.0;
    double progress = total_steps > warmup ? fmin(1.0, fmax(0.0, (step - warmup) / (total_steps - warmup))) : 0.0;
    double rate = lr * rise * (final + (1.0 - final) * 0.5 * (1.0 + cospi(progress)));
    double life = ramp >= 0.0 ? fmin(half_life, ramp * step) : half_life;
    scalars[LR] = (float)rate;
    scalars[GRAD_SCALE] = (float)(scale * fmin(1.0, clip / (grad_norm + 1e-6)));
    scalars[STEP_SIZE] = (float)(rate / -expm1(t * log_beta1));
    scalars[RSQRT_BIAS2] = (float)(1.0 / sqrt(-expm1(t * log_beta2)));
    scalars[EMA_WEIGHT] = (float)-expm1(-0.6931471805599453 / fmax(life, 1e-8));
    scalars[NORM] = (float)grad_norm;
    scalars[APPLY] = apply;
}

// Scalars for another learning rate and other betas, after step_scalars: own[LR] = scalars[LR] · ratio · the step's factor.
// `own` may be `scalars`. factors: one for each of `length` steps, after which the last remains; or null, for 1.
extern "C" __global__ void rescale(const float* scalars, const int* __restrict__ counters, float* own,
                                   const float* __restrict__ factors, int length, double ratio, double log_beta1,
                                   double log_beta2) {
    wait_for_previous();
    if (threadIdx.x > 0) return;
    double t = counters[UPDATES] > 0 ? counters[UPDATES] : 1;
    int step = counters[UPDATES] + counters[SKIPPED] - 1;
    double rate = scalars[LR] * ratio * (factors == nullptr ? 1.0f : factors[min(step, length - 1)]);
    for (int i = 0; i <= APPLY; i++) own[i] = scalars[i];
    own[LR] = (float)rate;
    own[STEP_SIZE] = (float)(rate / -expm1(t * log_beta1));
    own[RSQRT_BIAS2] = (float)(1.0 / sqrt(-expm1(t * log_beta2)));
}

// Dynamic loss scaling, after step_scalars. state[0] is the loss scale, by which the gradient was multiplied; state[1] counts
// the steps in a row that were not skipped. First NORM becomes the norm of the unscaled gradient, and GRAD_SCALE also divides
// by the scale. Then the scale of the next step is set: half after a skipped step, at least 1; twice after `interval` steps in
// a row, at most `largest`. A skipped step that halves the scale sets SKIPPED_IN_A_ROW to 0.
extern "C" __global__ void unscale(float* state, float* scalars, int* counters, double scale, double clip, int interval,
                                   float largest) {
    wait_for_previous();
    if (threadIdx.x > 0) return;
    float by = state[0], good = state[1] + 1.0f;
    double grad_norm = (double)scalars[NORM] / by;
    scalars[NORM] = (float)grad_norm;
    scalars[GRAD_SCALE] = (float)(scale * fmin(1.0, clip / (grad_norm + 1e-6)) / by);
    if (scalars[APPLY] == 0.0f) {
        if (by > 1.0f) counters[SKIPPED_IN_A_ROW] = 0;
        state[0] = fmaxf(1.0f, 0.5f * by);
        state[1] = 0.0f;
    } else {
        bool grows = good >= interval;
        state[0] = grows ? fminf(largest, 2.0f * by) : by;
        state[1] = grows ? 0.0f : good;
    }
}

struct __align__(8) Copy4 { T v[4]; };

__device__ __forceinline__ void store_copy(T* compute_copy, i64 i, const Pack<float>& x) {
    if (compute_copy == nullptr) return;
    Copy4 low;
#pragma unroll
    for (int k = 0; k < 4; k++) low.v[k] = from_float<T>(x.v[k]);
    *reinterpret_cast<uint2*>(compute_copy + i) = *reinterpret_cast<const uint2*>(&low);
}

// Store the new parameters, also in other GPUs' memory, their compute copy, the moving average and its compute copy.
__device__ __forceinline__ void finish(i64 i, const Pack<float>& p, float* data, const Peers& peers, T* compute_copy,
                                       float* ema, T* ema_copy, float weight) {
    Pack<float> e = ema == nullptr ? p : load_pack(ema + i);  // loaded before the stores to other GPUs
    store_pack(data + i, p);
    if (peers.count > 0)
#pragma unroll
        for (int other = 0; other < 7; other++)
            if (other < peers.count) store_pack(peers.data[other] + i, p);
    store_copy(compute_copy, i, p);
    if (ema == nullptr) return;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float gap = p.v[k] - e.v[k];
        e.v[k] = weight < 0.5f ? e.v[k] + weight * gap : p.v[k] - (1.0f - weight) * gap;  // exact where weight is 1
    }
    store_pack(ema + i, e);
    store_copy(ema_copy, i, e);
}

// This thread's elements. The first blocks take the last elements, which the norm of the gradient left in L2.
__device__ __forceinline__ i64 own_elements() { return ((i64)(gridDim.x - 1 - blockIdx.x) * blockDim.x + threadIdx.x) * 4; }

extern "C" __global__ void adam(float* __restrict__ data, const float* __restrict__ grad, float* __restrict__ exp_avg,
                                float* __restrict__ exp_avg_sq, const float* __restrict__ scalars,
                                const u8* __restrict__ flags, T* __restrict__ compute_copy, float* __restrict__ ema,
                                T* __restrict__ ema_copy, Peers peers, i64 n, float one_minus_beta1, float one_minus_beta2,
                                float eps, float weight_decay, int decoupled) {
    wait_for_previous();
    i64 i = own_elements();
    if (i >= n) return;
    int flag = flags[i / 32];  // loaded at the same time as scalars[APPLY]
    if (scalars[APPLY] == 0.0f || flag & FROZEN) return;
    float grad_scale = scalars[GRAD_SCALE], step_size = scalars[STEP_SIZE], rsqrt_bias2 = scalars[RSQRT_BIAS2];
    float wd = flag & DECAY ? weight_decay : 0.0f;
    float shrink = decoupled ? 1.0f - scalars[LR] * wd : 1.0f, l2 = decoupled ? 0.0f : wd;
    Pack<float> p = load_pack(data + i), g = load_pack(grad + i), m = load_pack(exp_avg + i), v = load_pack(exp_avg_sq + i);
    add_gradients(g, peers, i);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float gk = grad_scale * g.v[k] + l2 * p.v[k];
        m.v[k] += one_minus_beta1 * (gk - m.v[k]);
        v.v[k] = v.v[k] - one_minus_beta2 * v.v[k] + one_minus_beta2 * gk * gk;  // not 0 beside a larger old value
        p.v[k] = shrink * p.v[k] - step_size * m.v[k] / (sqrtf(v.v[k]) * rsqrt_bias2 + eps);
    }
    store_pack(exp_avg + i, m);
    store_pack(exp_avg_sq + i, v);
    finish(i, p, data, peers, compute_copy, ema, ema_copy, scalars[EMA_WEIGHT]);
}

extern "C" __global__ void sgd(float* __restrict__ data, const float* __restrict__ grad,
                               float* __restrict__ momentum_buffer, const float* __restrict__ scalars,
                               const u8* __restrict__ flags, T* __restrict__ compute_copy, float* __restrict__ ema,
                               T* __restrict__ ema_copy, Peers peers, i64 n, float momentum, float weight_decay,
                               int nesterov) {
    wait_for_previous();
    i64 i = own_elements();
    if (i >= n) return;
    int flag = flags[i / 32];  // loaded at the same time as scalars[APPLY]
    if (scalars[APPLY] == 0.0f || flag & FROZEN) return;
    float grad_scale = scalars[GRAD_SCALE], lr = scalars[LR];
    float wd = flag & DECAY ? weight_decay : 0.0f;
    Pack<float> p = load_pack(data + i), g = load_pack(grad + i), b = load_pack(momentum_buffer + i);
    add_gradients(g, peers, i);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float gk = grad_scale * g.v[k] + wd * p.v[k];
        b.v[k] = momentum * b.v[k] + gk;
        p.v[k] -= lr * (nesterov ? gk + momentum * b.v[k] : b.v[k]);
    }
    store_pack(momentum_buffer + i, b);
    finish(i, p, data, peers, compute_copy, ema, ema_copy, scalars[EMA_WEIGHT]);
}

// grad_avg may be null: then the mean square is not centred.
extern "C" __global__ void rmsprop(float* __restrict__ data, const float* __restrict__ grad, float* __restrict__ square_avg,
                                   float* __restrict__ momentum_buffer, float* __restrict__ grad_avg,
                                   const float* __restrict__ scalars, const u8* __restrict__ flags,
                                   T* __restrict__ compute_copy, float* __restrict__ ema, T* __restrict__ ema_copy,
                                   Peers peers, i64 n, float one_minus_alpha, float eps, float momentum,
                                   float weight_decay) {
    wait_for_previous();
    i64 i = own_elements();
    if (i >= n) return;
    int flag = flags[i / 32];  // loaded at the same time as scalars[APPLY]
    if (scalars[APPLY] == 0.0f || flag & FROZEN) return;
    float grad_scale = scalars[GRAD_SCALE], lr = scalars[LR];
    float wd = flag & DECAY ? weight_decay : 0.0f;
    Pack<float> p = load_pack(data + i), g = load_pack(grad + i), v = load_pack(square_avg + i), mean = {};
    Pack<float> b = load_pack(momentum_buffer + i);
    if (grad_avg != nullptr) mean = load_pack(grad_avg + i);
    add_gradients(g, peers, i);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float gk = grad_scale * g.v[k] + wd * p.v[k];
        v.v[k] = v.v[k] - one_minus_alpha * v.v[k] + one_minus_alpha * gk * gk;  // as in adam
        if (grad_avg != nullptr) mean.v[k] += one_minus_alpha * (gk - mean.v[k]);
        b.v[k] = momentum * b.v[k] + gk / (sqrtf(fmaxf(v.v[k] - mean.v[k] * mean.v[k], 0.0f)) + eps);
        p.v[k] -= lr * b.v[k];
    }
    store_pack(square_avg + i, v);
    store_pack(momentum_buffer + i, b);
    if (grad_avg != nullptr) store_pack(grad_avg + i, mean);
    finish(i, p, data, peers, compute_copy, ema, ema_copy, scalars[EMA_WEIGHT]);
}

extern "C" __global__ void lion(float* __restrict__ data, const float* __restrict__ grad, float* __restrict__ exp_avg,
                                const float* __restrict__ scalars, const u8* __restrict__ flags,
                                T* __restrict__ compute_copy, float* __restrict__ ema, T* __restrict__ ema_copy,
                                Peers peers, i64 n, float beta1, float beta2, float weight_decay) {
    wait_for_previous();
    i64 i = own_elements();
    if (i >= n) return;
    int flag = flags[i / 32];  // loaded at the same time as scalars[APPLY]
    if (scalars[APPLY] == 0.0f || flag & FROZEN) return;
    float grad_scale = scalars[GRAD_SCALE], lr = scalars[LR];
    float shrink = 1.0f - lr * (flag & DECAY ? weight_decay : 0.0f);
    Pack<float> p = load_pack(data + i), g = load_pack(grad + i), m = load_pack(exp_avg + i);
    add_gradients(g, peers, i);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float gk = grad_scale * g.v[k], gap = m.v[k] - gk, direction = beta1 * gap + gk;
        p.v[k] = shrink * p.v[k] - lr * (float)((direction > 0.0f) - (direction < 0.0f));
        m.v[k] = beta2 * gap + gk;
    }
    store_pack(exp_avg + i, m);
    finish(i, p, data, peers, compute_copy, ema, ema_copy, scalars[EMA_WEIGHT]);
}
