// Small kernels, each right or wrong in one way: what the checks of the harness are tested with.
#include "simt.h"

// Reverses each block's part of x, through shared memory.
template <bool kSync>
__global__ void reverse(const float* x, float* y) {
  DYNAMIC_SHARED(float, tile);
  const int first = blockIdx.x * blockDim.x;
  tile[threadIdx.x] = x[first + threadIdx.x];
  if (kSync) __syncthreads();
  y[first + threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

// The same within a warp. A shuffle is no memory barrier.
enum WarpOrder { kNone, kShuffle, kSyncWarp };
template <int kOrder>
__global__ void reverse_warp(const float* x, float* y) {
  __shared__ float tile[32];
  tile[threadIdx.x] = x[threadIdx.x];
  if (kOrder == kShuffle) __shfl_xor_sync(0xffffffffu, 1, 1);
  if (kOrder == kSyncWarp) __syncwarp();
  y[threadIdx.x] = tile[31 - threadIdx.x];
}

// Every thread reads what one of them writes afterwards. Neighbours write halves of one 4-byte
// word, which is no race.
template <bool kSync>
__global__ void broadcast(const float* x, float* y) {
  DYNAMIC_SHARED(unsigned short, tile);
  tile[threadIdx.x] = float_to_half_bits(x[threadIdx.x]);
  __syncthreads();
  y[threadIdx.x] = half_bits_to_float(tile[5]);
  if (kSync)
    __syncthreads();
  else
    __syncwarp();
  if (threadIdx.x == 0) tile[5] = 0;
}

// Reverses through cp.async.
template <bool kWait, bool kSync>
__global__ void reverse_async(const float* x, float* y, int shift) {
  DYNAMIC_SHARED(float, tile);
  const int n = blockDim.x * 4, i = threadIdx.x * 4;
  cp_async<16>(tile + i, x + i + shift);
  cp_async_commit();
  if (kWait) cp_async_wait<0>();
  if (kSync) __syncthreads();
  for (int j = 0; j < 4; j++) y[i + j] = tile[n - 1 - i - j];
}

// A warp fills one of two buffers while the other warp drains the other one.
template <bool kFree>
__global__ void pipeline(const float* x, float* y, int steps) {
  DYNAMIC_SHARED(float, tile);
  enum { kFull = 1, kEmpty = 3 };  // and the numbers after them, by buffer
  const int lane = threadIdx.x % 32;
  for (int t = 0; t < steps; t++) {
    const int half = t % 2;
    if (threadIdx.x < 32) {
      if (kFree && t >= 2) bar_sync(kEmpty + half, 64);
      tile[half * 32 + lane] = x[t * 32 + lane];
      bar_arrive(kFull + half, 64);
    } else {
      bar_sync(kFull + half, 64);
      y[t * 32 + lane] = tile[half * 32 + 31 - lane];
      if (kFree && t + 2 < steps) bar_arrive(kEmpty + half, 64);
    }
  }
}

// Sums x over all blocks into y[0]: the last block to finish adds up what the others left in part.
template <bool kAtomic>
__global__ void sum_blocks(const float* x, float* part, int* done, float* y) {
  if (threadIdx.x) return;
  part[blockIdx.x] = x[blockIdx.x];
  __threadfence();
  const int before = kAtomic ? atomicAdd(done, 1) : (*done)++;
  if (before != int(gridDim.x) - 1) return;
  float sum = 0;
  for (int i = 0; i < int(gridDim.x); i++) sum += part[i];
  *y = sum;
}

enum Fault {
  kRight,
  kReadPast,
  kWritePast,
  kWriteInput,
  kSharedPast,
  kUninitialised,
  kVectorShared,
  kVectorGlobal,
  kMatrixRow,
  kLocalPast,
  kOverflow,
  kMask,
  kDiverges,
  kTwoPlaces,
  kLonely,
  kCounts,
  kBeyond,
  kAbandoned,
  kLivelock,
  kOtherLocal,
  kNowhere,
  kZero,
  kDeep,
};

// Needs more stack than a thread has on the CPU.
__device__ __noinline__ float deep(float x, int n) {
  volatile float local[256];
  local[n % 256] = x;
  return n ? deep(x, n - 1) + local[n % 256] : x;
}

template <int kFault>
__global__ void broken(const float* x, float* y, int n) {
  DYNAMIC_SHARED(float, tile);
  const int i = threadIdx.x, last = blockDim.x - 1;
  const unsigned all = 0xffffffffu;
  tile[i] = i;
  __syncthreads();
  if (kFault == kRight) y[i] = x[i] + tile[i];
  if (kFault == kReadPast) y[i] = x[i + 1];
  if (kFault == kWritePast) y[i + (i == last)] = x[i];
  if (kFault == kWriteInput) const_cast<float*>(x)[i] = 0;
  if (kFault == kSharedPast) tile[i + 2 * n] = x[i];
  if (kFault == kUninitialised) y[i] = tile[i + n / 2];
  if (kFault == kVectorShared) y[i] = reinterpret_cast<const float4*>(tile + 2)->x;
  if (kFault == kVectorGlobal) y[i] = reinterpret_cast<const float2*>(x + 1)->y;
  if (kFault == kMatrixRow) {
    unsigned r[4];
    ldmatrix_x4(r, tile + 1);
    y[i] = r[0];
  }
  if (kFault == kLocalPast) {
    float local[4] = {};
    for (int j = 0; j <= n / 16; j++) local[j] = x[j];
    y[i] = local[i % 4];
  }
  if (kFault == kOverflow) y[i] = (n << 20) * (n << 20);
  if (kFault == kMask) y[i] = __shfl_sync(0xffffu, x[i], 0);
  if (kFault == kDiverges && i < 16) y[i] = __shfl_xor_sync(all, x[i], 1);
  if (kFault == kTwoPlaces) {
    if (i % 2)
      y[i] = __shfl_xor_sync(all, x[i], 1);
    else
      y[i] = __shfl_xor_sync(all, x[i], 1);
  }
  if (kFault == kLonely && i < 32) bar_sync(1, 64);
  if (kFault == kCounts) bar_sync(1, i < 32 ? 64 : 32);
  if (kFault == kBeyond && i < 32) bar_sync(1, 128);
  if (kFault == kAbandoned && i < 32) __syncwarp(i < 16 ? 0xffffu : all);
  if (kFault == kLivelock)
    while (atomicAdd(&tile[0], 0) == 0) __nanosleep(100);
  if (kFault == kNowhere) y[i] = x[(long long)n << 34];
  if (kFault == kZero) y[i] = n / (n - 64);
  if (kFault == kDeep) y[i] = deep(x[i], 1000);
  if (kFault == kOtherLocal) {
    DYNAMIC_SHARED(float*, shared_pointer);
    float local = x[i];
    __syncthreads();
    if (i == 0) *shared_pointer = &local;
    __syncthreads();
    if (i == 1) **shared_pointer = 1;
    y[i] = local;
  }
  __syncthreads();
}

// Threads that have returned are not waited for.
__global__ void leave_early(const float* x, float* y, int n) {
  DYNAMIC_SHARED(float, tile);
  const int i = threadIdx.x;
  if (i >= n) return;
  tile[i] = x[i];
  __syncthreads();
  float sum = tile[n - 1 - i];
  for (int j = 16; j; j /= 2) sum += __shfl_down_sync(0xffffffffu, sum, j);
  y[i] = sum;
}

// Blocks that wait for each other: block b for the word of the next one. kFaulty: one breaks a
// rule.
template <bool kFaulty>
__global__ void meet(volatile int* words) {
  const int next = (blockIdx.x + 1) % gridDim.x;
  if (kFaulty && blockIdx.x == 1) bar_sync(99, 32);
  if (threadIdx.x == 0) words[blockIdx.x] = 1 + blockIdx.x;
  while (words[next] != 1 + next) __nanosleep(20);
}
