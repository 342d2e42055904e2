// What kernels for sm_90a share whose warpgroups have roles.
#pragma once
#include "decay.cuh"

constexpr int kGroup = 128;         // threads of a warpgroup
constexpr int kTile = kChunk * 64;  // 16-bit numbers of a tile of 64 rows

// How blocks come by what they work on: every block has the same number of sequences of heads, or
// one piece of one, or takes a packed one from a queue whenever it has done with another.
enum Dealing { kInSteps, kInPieces, kByQueue };

// One of n things by turns, and how often it has been come back to, modulo 2.
template <int n>
struct Turn {
  int slot = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void next() {
    if (++slot == n) slot = 0, parity ^= 1;
  }
};
