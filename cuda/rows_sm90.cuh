// Rows of y that linear_sm90.cu writes itself: the copy engine would write others with them, or has
// none to copy. Eight numbers at once, of arrays that the copy engine takes.
#pragma once
#include "feed_sm90.cuh"

// Numbers col to col + 7 of a row, or as many of them as it has.
__device__ __forceinline__ void put_eight(unsigned short* row, int col, int cols, uint4 x) {
  if (col + 8 <= cols) {
    *reinterpret_cast<uint4*>(row + col) = x;
    return;
  }
  const unsigned pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (col + i < cols) row[col + i] = pairs[i / 2] >> i % 2 * 16;
}

// The first rows of a chunk's outputs, which lie in swizzled tiles, by a warpgroup.
template <int V>
__device__ __forceinline__ void store_rows(unsigned short* y, long long stride, int rows, int cols,
                                           const unsigned short* tiles, int thread) {
  constexpr int kVectors = V / 8;
#pragma unroll 1
  for (int e = thread; e < rows * kVectors; e += kGroup) {
    const int row = e / kVectors, vector = e % kVectors;
    const unsigned short* const from = tiles + vector / 8 * kTile + swizzled(row, vector % 8);
    put_eight(y + row * stride, vector * 8, cols, *reinterpret_cast<const uint4*>(from));
  }
}

// Clears outputs of tokens of no sequence, from `end` on, of some heads from h on, by one warp of
// each of several blocks.
__device__ __forceinline__ void clear_rest(const CallArgs& a, int cols, int end, int h, int heads,
                                           int block, int blocks, int lane) {
  const long long rows = (a.T - end) * heads;
#pragma unroll 1
  for (long long i = 2ll * block + lane / 16; i < rows; i += 2 * blocks) {
    unsigned short* const row = static_cast<unsigned short*>(a.y) +
                                (end + i / heads) * a.y_stride[1] + (h + i % heads) * a.y_stride[2];
#pragma unroll 1
    for (int col = lane % 16 * 8; col < cols; col += 16 * 8)
      put_eight(row, col, cols, uint4{0, 0, 0, 0});
  }
}
