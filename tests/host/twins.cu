// Every instruction the harness imitates, for comparison with NumPy.
#include "simt.h"

template <class T>
__global__ void shuffles(const T* x, T* out) {  // out: (7, 32)
  const int i = threadIdx.x;
  const unsigned all = 0xffffffffu;
  out[0 * 32 + i] = __shfl_sync(all, x[i], 5);
  out[1 * 32 + i] = __shfl_sync(all, x[i], i + 3, 8);
  out[2 * 32 + i] = __shfl_xor_sync(all, x[i], 6);
  out[3 * 32 + i] = __shfl_down_sync(all, x[i], 3);
  out[4 * 32 + i] = __shfl_down_sync(all, x[i], 3, 16);
  out[5 * 32 + i] = __shfl_up_sync(all, x[i], 5);
  out[6 * 32 + i] = __shfl_up_sync(all, x[i], 5, 8);
}

__global__ void votes(const int* x, unsigned* out) {  // out: (9, 32)
  const int i = threadIdx.x;
  const unsigned mask = i % 2 ? 0xaaaaaaaau : 0x55555555u;
  out[0 * 32 + i] = __ballot_sync(mask, x[i] > 0);
  out[1 * 32 + i] = __any_sync(mask, x[i] > 0);
  out[2 * 32 + i] = __all_sync(mask, x[i] > 0);
  out[3 * 32 + i] = __reduce_add_sync(mask, x[i]);
  out[4 * 32 + i] = __reduce_min_sync(mask, x[i]);
  out[5 * 32 + i] = __reduce_max_sync(mask, x[i]);
  out[6 * 32 + i] = __reduce_xor_sync(mask, unsigned(x[i]));
  out[7 * 32 + i] = __popc(x[i]) + 100 * __clz(x[i]);
  out[8 * 32 + i] = __match_any_sync(mask, unsigned(x[i]) % 3);
}

__global__ void to_float(const unsigned short* x, float* half, float* bfloat16, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    half[i] = half_bits_to_float(x[i]);
    bfloat16[i] = bfloat16_bits_to_float(x[i]);
  }
}

__global__ void from_float(const float* x, unsigned short* half, unsigned short* bfloat16, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    half[i] = float_to_half_bits(x[i]);
    bfloat16[i] = float_to_bfloat16_bits(x[i]);
  }
}

// d (16, 8) += a (16, 16) b (16, 8), 16-bit elements; b is also given transposed, (8, 16).
template <bool kHalf, bool kTransposed>
__global__ void product16(const unsigned short* a, const unsigned short* b, float* d) {
  DYNAMIC_SHARED(unsigned short, tile);
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) tile[i] = a[i];
  for (int i = lane; i < 128; i += 32) tile[256 + i] = b[i];
  __syncwarp();
  unsigned fa[4], fb[2];
  ldmatrix_x4(fa, tile + lane % 16 * 16 + lane / 16 * 8);
  if (kTransposed)
    ldmatrix_x2(fb, tile + 256 + lane % 8 * 16 + lane / 8 % 2 * 8);
  else
    ldmatrix_x2<true>(fb, tile + 256 + lane % 16 * 8);
  float sum[4];
  for (int i = 0; i < 4; i++) sum[i] = d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2];
  if (kHalf)
    mma_m16n8k16_f16(sum, fa, fb);
  else
    mma_m16n8k16_bf16(sum, fa, fb);
  for (int i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sum[i];
}

// d (16, 8) += a (16, 8) b (8, 8)
__global__ void product_tf32(const float* a, const float* b, float* d) {
  const int group = threadIdx.x / 4, in_group = threadIdx.x % 4;
  unsigned fa[4], fb[2];
  float sum[4];
  for (int i = 0; i < 4; i++) {
    fa[i] = float_to_tf32_bits(a[(group + i % 2 * 8) * 8 + in_group + i / 2 * 4]);
    sum[i] = d[(group + i / 2 * 8) * 8 + in_group * 2 + i % 2];
  }
  for (int i = 0; i < 2; i++) fb[i] = float_to_tf32_bits(b[(in_group + i * 4) * 8 + group]);
  mma_m16n8k8_tf32(sum, fa, fb);
  for (int i = 0; i < 4; i++) d[(group + i / 2 * 8) * 8 + in_group * 2 + i % 2] = sum[i];
}

// d (8, 8) += a (8, 4) b (4, 8)
__global__ void product_f64(const double* a, const double* b, double* d) {
  const int group = threadIdx.x / 4, in_group = threadIdx.x % 4;
  double sum[2] = {d[group * 8 + in_group * 2], d[group * 8 + in_group * 2 + 1]};
  mma_m8n8k4_f64(sum, a[group * 4 + in_group], b[in_group * 8 + group]);
  for (int i = 0; i < 2; i++) d[group * 8 + in_group * 2 + i] = sum[i];
}

// Copies x into y by pieces of 4, 8 and 16 bytes, of which the last ones are partly zero.
__global__ void copies(const float* x, float* y) {  // x: (3, 4), y: (3, 4)
  DYNAMIC_SHARED(float, tile);
  for (int i = 0; i < 4; i++) cp_async<4>(tile + i, x + i);
  for (int i = 4; i < 8; i += 2) cp_async<8>(tile + i, x + i, 4);
  cp_async_commit();
  cp_async<16>(tile + 8, x + 8, 12);
  cp_async_commit();
  cp_async_wait<1>();
  for (int i = 0; i < 8; i++) y[i] = tile[i];
  cp_async_wait<0>();
  for (int i = 8; i < 12; i++) y[i] = tile[i];
}

// A warp waits for a flag that the other one sets.
__global__ void spin(int* flag, int* y) {
  if (threadIdx.x < 32) {
    while (atomicAdd(flag, 0) == 0) __nanosleep(20);
    if (threadIdx.x == 0) y[0] = y[1] + 1;
  } else if (threadIdx.x == 32) {
    y[1] = 6;
    __threadfence();
    atomicExch(flag, 1);
  }
}
