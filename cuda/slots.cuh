// Chunks of all sequences of a call, one after the other in slots, each sequence from a slot of its
// own on.
#pragma once
#include "call.cuh"

// The slot of the first chunk of sequence n.
template <int kChunk>
__device__ __forceinline__ long long first_slot(const CallArgs& a, long long n) {
  return a.cu_seqlens ? offset(a, n) / kChunk + n : n * ((a.T + kChunk - 1) / kChunk);
}

// The chunk in a slot: `tokens` tokens of batch entry b from `first` on; none in a slot left free.
template <int kChunk>
struct ChunkInSlot {
  long long b, first;
  int tokens;

  __device__ __forceinline__ ChunkInSlot(const CallArgs& a, long long slot) {
    long long n = 0;
    if (a.cu_seqlens) {
      for (long long past = a.N; past - n > 1;) {
        const long long middle = (n + past) / 2;
        if (first_slot<kChunk>(a, middle) <= slot)
          n = middle;
        else
          past = middle;
      }
    } else {
      // as a grid has fewer blocks than 2^32; short numbers are quick to divide
      n = static_cast<unsigned>(slot) / static_cast<unsigned>((a.T + kChunk - 1) / kChunk);
    }
    const Sequence range = sequence(a, n);
    b = range.b;
    first = range.start + (slot - first_slot<kChunk>(a, n)) * kChunk;
    const long long left = range.stop - first;
    tokens = static_cast<int>(left < 0 ? 0 : min(left, static_cast<long long>(kChunk)));
  }
};

// Sums of squares of A up to this leave all of the inverse far from overflow.
constexpr float kMostGrowth = 4096;

// What a chunk's share in the gradient of the state before it is multiplied with while it is summed
// up, where its first gate makes it so small that numbers would lose digits.
__device__ __forceinline__ float lift(float first) {
  return fabsf(first) < 8.6736174e-19f ? 1.152921504606847e18f : 1.f;  // 2^-60, 2^60
}
