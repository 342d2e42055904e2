// Every line of inline PTX, in named wrappers. Under SIMT_HOST the same names come from the host
// twins of tests/host, so that kernels run on a CPU unchanged. No CUDA header is included: NVRTC
// needs none for what is here, and compiling one costs more than compiling a kernel.
#pragma once

#ifdef SIMT_HOST
#include <simt.h>
#else

// Dynamic shared memory of a kernel, `name` of element type `type`, aligned for 16-byte access.
#define DYNAMIC_SHARED(type, name)                             \
  extern __shared__ __align__(128) unsigned char name##_raw[]; \
  type* const name = reinterpret_cast<type*>(name##_raw)

__device__ __forceinline__ float half_bits_to_float(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

__device__ __forceinline__ unsigned short float_to_half_bits(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float bfloat16_bits_to_float(unsigned short x) {
  return __uint_as_float(static_cast<unsigned>(x) << 16);
}

__device__ __forceinline__ unsigned short float_to_bfloat16_bits(float x) {
  unsigned short y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

#endif
