// Sinusoidal embedding: out (rows, dim) float32 from t (rows) of type T; frequency i is exp(-decay * i), i < dim / 2.
// The first dim/2 columns are cosines and the next sines, or the other way round with sin_first; an odd last column is 0.
// Angles are double, as in NumPy: a float frequency would be off by 6e-5 at t = 1000. Outputs are overwritten.
#include "reduce.cuh"

// One thread an element of out.
extern "C" __global__ void forward(float* out, const T* t, int rows, int dim, double decay, int sin_first) {
    wait_for_previous();
    int i = blockIdx.x * blockDim.x + threadIdx.x, half_dim = dim / 2;
    if (i >= rows * dim) return;
    int row = i / dim, column = i % dim;
    bool second = column >= half_dim;
    double angle = (double)to_float(t[row]) * exp(-decay * (second ? column - half_dim : column));
    out[i] = column >= 2 * half_dim ? 0.0f : (float)(second == (bool)sin_first ? cos(angle) : sin(angle));
}

// One block a row: dt[row] = sum over i of frequency * (dsin * cos(angle) - dcos * sin(angle)).
extern "C" __global__ void backward(T* dt, const float* dout, const T* t, int dim, double decay, int sin_first) {
    wait_for_previous();
    int half_dim = dim / 2;
    const float* first = dout + (i64)blockIdx.x * dim;
    const float* second = first + half_dim;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < half_dim; i += blockDim.x) {
        double frequency = exp(-decay * i), sine, cosine;
        sincos((double)to_float(t[blockIdx.x]) * frequency, &sine, &cosine);
        double dsine = sin_first ? first[i] : second[i], dcosine = sin_first ? second[i] : first[i];
        sum += (float)(frequency * (dsine * cosine - dcosine * sine));
    }
    sum = block_reduce<Sum>(sum);
    if (threadIdx.x == 0) dt[blockIdx.x] = from_float<T>(sum);
}
