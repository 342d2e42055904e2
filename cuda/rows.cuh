// How the K rows of a column of the state are laid over kRows neighbouring lanes, and sums over
// them.
#pragma once
#include "types.cuh"

// Rows go to lanes in runs of kRun neighbours, so that the lanes of a column read kRows * kRun
// consecutive numbers of k or q at once, as vectors where the run allows.
template <class State, int K, int kRows>
struct RowMap {
  static constexpr int kEach = (K + kRows - 1) / kRows;
  static constexpr int kVector = 16 / sizeof(State);
  static constexpr int kRun = kEach % kVector == 0 ? kVector : (kEach % 2 == 0 ? 2 : 1);
  static constexpr int kPadded = kRows * kEach;

  static __device__ __forceinline__ int row(int lane_row, int i) {
    return (i / kRun * kRows + lane_row) * kRun + i % kRun;
  }

  // A lane's own rows of a vector in shared memory, padded with zeros to kPadded.
  static __device__ __forceinline__ void read(State (&x)[kEach], const State* vector,
                                              int lane_row) {
#pragma unroll
    for (int i = 0; i < kEach; i += kRun) {
      const auto run = *reinterpret_cast<const Run<State, kRun>*>(vector + row(lane_row, i));
#pragma unroll
      for (int j = 0; j < kRun; j++) x[i + j] = run.x[j];
    }
  }
};

// Sum over the kRows lanes that share a column; every one of them gets it.
template <int kRows, class T>
__device__ __forceinline__ T sum_rows(T x) {
#pragma unroll
  for (int step = 1; step < kRows; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// The same for n values at once, in fewer steps: a lane is left with the sums of its own share of
// them, max(1, n / kRows) values from the returned index on, in x[0] and after. Lanes from n on
// hold what lower ones hold. In each step a lane keeps half of its values and hands on the other
// half.
template <int kRows, int n, int kStep = 1, class T>
__device__ __forceinline__ int share_sums(T* x, int lane_row) {
  if constexpr (kStep >= kRows) {
    return 0;
  } else if constexpr (n == 1) {
    x[0] += __shfl_xor_sync(0xffffffffu, x[0], kStep);
    return share_sums<kRows, 1, 2 * kStep>(x, lane_row);
  } else {
    constexpr int kHalf = n / 2;
    const bool upper = lane_row & kStep;
#pragma unroll
    for (int i = 0; i < kHalf; i++) {
      const T mine = upper ? x[kHalf + i] : x[i], theirs = upper ? x[i] : x[kHalf + i];
      x[i] = mine + __shfl_xor_sync(0xffffffffu, theirs, kStep);
    }
    return (upper ? kHalf : 0) + share_sums<kRows, kHalf, 2 * kStep>(x, lane_row);
  }
}
