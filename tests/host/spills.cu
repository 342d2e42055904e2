// What the register budget is tested with: kernels that keep numbers in local memory.

// Indexes an array in a way known only at run time.
template <int kSize>
__global__ void local_array(float* x, int n) {
  float a[kSize];
  for (int i = 0; i < kSize; i++) a[i] = x[i];
  float sum = 0;
  for (int i = 0; i < n; i++) sum += a[(i * 7 + n) % kSize];
  x[threadIdx.x] = sum;
}

// Keeps kSize numbers at once in each of 1024 threads, which have 64 registers each.
template <int kSize>
__global__ void __launch_bounds__(1024) keep(float* x) {
  float a[kSize];
#pragma unroll
  for (int i = 0; i < kSize; i++) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSize; i++) x[i * 1024 + threadIdx.x] = a[i] * a[kSize - 1 - i];
}

// The same through a function that is not inlined.
__device__ __noinline__ float pick(const float* x, int n) {
  float a[16];
  for (int i = 0; i < 16; i++) a[i] = x[i];
  float sum = 0;
  for (int i = 0; i < n; i++) sum += a[(i * 7 + n) % 16];
  return sum;
}
__global__ void calls(float* x, int n) { x[threadIdx.x] = pick(x, n) + pick(x + 16, n); }

// Uses 1 KB of static shared memory, and no local memory.
__global__ void shares(float* x) {
  __shared__ float tile[256];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = tile[255 - threadIdx.x];
}
