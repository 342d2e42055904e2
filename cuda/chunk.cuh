// Chunks of 64 tokens on their way into shared memory.
#pragma once
#include "call.cuh"
#include "decay.cuh"

constexpr int kCopyRows = kChunk / 2;  // by each of two warps

// Rows of a chunk into shared memory by one warp: kCols numbers a row, of which cols are real.
template <int kCols, int kRow, bool kWide>
__device__ __forceinline__ void copy_rows(unsigned short* to, const unsigned short* from,
                                          long long stride, int rows, int cols, int lane) {
  constexpr int kStep = kWide ? 8 : 1, kSteps = kCols / kStep;
  if constexpr (kWide && 32 % kSteps == 0) {  // a lane keeps to its columns
    constexpr int kDown = 32 / kSteps;
    const int first = lane / kSteps, at = lane % kSteps * kStep;
    const int left = at < cols ? rows - first : 0;
    const unsigned short* source = from + first * stride + at;
    unsigned short* const target = to + first * kRow + at;
#pragma unroll 4
    for (int row = 0; row < kCopyRows; row += kDown) {
      cp_async<16>(target + row * kRow, source, row < left ? 16 : 0);
      source += kDown * stride;
    }
  } else {
#pragma unroll(kWide ? 4 : 1)
    for (int e = lane; e < kCopyRows * kSteps; e += 32) {
      const int row = e / kSteps, at = e % kSteps * kStep;
      const bool real = row < rows && at < cols;
      const unsigned short* const source = from + (real ? row * stride + at : 0);
      if constexpr (kWide)
        cp_async<16>(to + row * kRow + at, source, real ? 16 : 0);
      else
        to[row * kRow + at] = real ? *source : 0;
    }
  }
}

// Gates and betas on their way to Decay, two tokens a lane, several chunks ahead: each is a read of
// its own, far from the next one.
struct GateRing {
  static constexpr int kSlots = 12;  // of two or three warps by turns
  float gate[kSlots][kChunk], beta[kSlots][kChunk];

  template <int kUnrolled = 2>
  __device__ __forceinline__ void fetch(int slot, const CallArgs& a, long long b, long long h,
                                        long long start, long long stop, int lane) {
#pragma unroll kUnrolled
    for (int i = 0; i < 2; i++) {
      const long long t = start + 2 * lane + i;
      if (t < stop) {
        copy(&gate[slot][2 * lane + i], a.gate, a.gate_kind,
             b * a.gate_stride[0] + t * a.gate_stride[1] + h * a.gate_stride[2]);
        copy(&beta[slot][2 * lane + i], a.beta, a.beta_kind,
             b * a.beta_stride[0] + t * a.beta_stride[1] + h * a.beta_stride[2]);
      }
    }
    cp_async_commit();
  }

  // A lane's two gates and betas; past the last of the tokens left: gate 1, beta 0.
  __device__ __forceinline__ void read(float (&g)[2], float (&b)[2], int slot, const CallArgs& a,
                                       long long left, int lane) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const bool real = 2 * lane + i < left;
      g[i] = real ? nan_if_infinite(value(gate[slot][2 * lane + i], a.gate_kind)) : 1.f;
      b[i] = real ? nan_if_infinite(value(beta[slot][2 * lane + i], a.beta_kind)) : 0.f;
    }
  }

  __device__ __forceinline__ void fill(Decay& decay, int slot, const CallArgs& a, long long left,
                                       int lane) const {
    float g[2], b[2];
    read(g, b, slot, a, left, lane);
    decay.fill(lane, g[0], g[1], b[0], b[1]);
  }

 private:
  static __device__ __forceinline__ void copy(float* to, const void* from, int kind, long long at) {
    if (kind == kAsFloat || kind == kLogOfFloat)
      cp_async<4>(to, static_cast<const float*>(from) + at);
    else if (kind != kAbsent)
      *to = widen<float>(static_cast<const bfloat16_t*>(from)[at]);
  }

  static __device__ __forceinline__ float value(float x, int kind) {
    if (kind == kAbsent) return 1.f;
    return kind == kLogOfInputs || kind == kLogOfFloat ? exp(x) : x;
  }
};
