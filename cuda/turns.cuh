// Places in a ring, for warps with roles of their own.
#pragma once

// One of n things by turns, and how often it has been come back to, modulo 2.
template <int n>
struct Turn {
  int slot = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void skip(int count) {  // at most n
    slot += count;
    if (slot >= n) slot -= n, parity ^= 1;
  }
  __device__ __forceinline__ void next() { skip(1); }
};
