// Rows of chunks and states in shared memory, and how a warp reads and writes factors there.
#pragma once
#include "products32.cuh"

// Rows in shared memory lie in boxes of 128 bytes a row, whose eight vectors of 16 bytes are
// swapped about as the copy engine does: vector i of row r lies at i ^ r % 8. A box begins at a
// multiple of 1024 bytes; what follows in all rows lies in a box of its own.
template <class In>
constexpr int kBoxCols = 128 / static_cast<int>(sizeof(In));  // numbers of a row of a box

template <class In>
__device__ __forceinline__ int boxed(int row, int x) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(In));
  return row * kBoxCols<In> + (x / kVector ^ row % 8) * kVector + x % kVector;
}

// What a lane reads of boxes in shared memory as four numbers of a factor, of tiles n and n + 1, n
// even. Which four a lane has is the same wherever factors meet; kBox numbers lie between boxes.
//
// Rows: of tile n, row 8 n + lane / 4, and four of its numbers. Of float32 they are neighbours,
// with an order of its own in each box; of float16 two pairs, from 16 k and 16 k + 8 on, 2 (lane %
// 4).
template <class In, int kBox>
struct Rows {
  const float* rows;
  int at;

  __device__ __forceinline__ Rows(const float* rows, int lane)
      : rows(rows), at(boxed<float>(lane / 4, lane % 4 * 8)) {}

  template <int kProducts>
  __device__ __forceinline__ void load_left(Four<kProducts> (&to)[2], int n, int k) const {
#pragma unroll
    for (int i = 0; i < 2; i++) to[i].set_left(read(n + i, k).x);
  }
  template <int kProducts>
  __device__ __forceinline__ void load_right(Four<kProducts> (&to)[2], int n, int k) const {
#pragma unroll
    for (int i = 0; i < 2; i++) to[i].set_right(read(n + i, k).x);
  }

  __device__ __forceinline__ Run<float, 4> read(int n, int k) const {
    return *reinterpret_cast<const Run<float, 4>*>(rows + (at ^ k % 2 * 4) + n * 8 * 32 +
                                                   k / 2 * kBox);
  }
};

// Columns: of tile n, column 8 (first + n) + lane / 4, and of tokens 16 k to 16 k + 15 two pairs of
// neighbours. Tiles are as many as a power of two that divides first, or first is 0.
template <class In, int kBox>
struct Columns {
  const float* at[4];
  int odd;  // from an even token to the next one

  __device__ __forceinline__ Columns(const float* rows, int first, int lane)
      : odd(lane / 16 ? 32 - 4 : 32 + 4) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      at[i] = rows + first / 4 * kBox + boxed<float>(lane % 4 * 2, (first % 4 ^ i) * 8 + lane / 4);
  }

  template <int kProducts>
  __device__ __forceinline__ void load_right(Four<kProducts> (&to)[2], int n, int k) const {
    float x[2][4];
    read(x, n, k);
#pragma unroll
    for (int i = 0; i < 2; i++) to[i].set_right(x[i]);
  }

  __device__ __forceinline__ void read(float (&to)[2][4], int n, int k) const {
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        to[tile][i] =
            at[(n + tile) % 4][i % 2 * odd + (k * 16 + i / 2 * 8) * 32 + (n + tile) / 4 * kBox];
  }
};

// Of float16: the vectors of a tile lie where this moves them, from where the first tile's lie.
template <int kBox>
__device__ __forceinline__ int moved(int at, int vectors) {
  return (at ^ vectors % 8 * 8) + vectors / 8 * kBox;
}

template <int kBox>
struct Rows<half_t, kBox> {
  const half_t* rows;
  int at;

  __device__ __forceinline__ Rows(const half_t* rows, int lane)
      : rows(rows), at(boxed<half_t>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8)) {}

  __device__ __forceinline__ void load_left(Halves (&to)[2], int n, int k) const {
    unsigned x[4];
    ldmatrix_x4(x, rows + moved<kBox>(at, 2 * k) + n * 8 * 64);
#pragma unroll
    for (int i = 0; i < 2; i++) to[i].set(x[2 * i], x[2 * i + 1]);
  }
  __device__ __forceinline__ void load_right(Halves (&to)[2], int n, int k) const {
    load_left(to, n, k);
  }
};

template <int kBox>
struct Columns<half_t, kBox> {
  const half_t* rows;
  int at;

  __device__ __forceinline__ Columns(const half_t* rows, int first, int lane)
      : rows(rows + first / 8 * kBox), at(boxed<half_t>(lane % 16, (first % 8 + lane / 16) * 8)) {}

  __device__ __forceinline__ void load_right(Halves (&to)[2], int n, int k) const {
    unsigned x[4];
    ldmatrix_x4<true>(x, rows + moved<kBox>(at, n) + k * 16 * 64);
#pragma unroll
    for (int i = 0; i < 2; i++) to[i].set(x[2 * i], x[2 * i + 1]);
  }

  __device__ __forceinline__ void read(float (&to)[2][4], int n, int k) const {
    Halves x[2];
    load_right(x, n, k);
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++) to[tile][i] = __uint_as_float(x[tile].big[i]);
  }
};

// A state as it is handed on in shared memory: float32, one row for each column of V. Four
// neighbours there stand for the numbers of K that a lane reads of rows of type In together.
template <class In, int kBox>
struct StateWriter {
  float* at[4];

  // Of rows from col0 on, numbers from 8 first on. As for columns, first is 0 or divides well.
  __device__ __forceinline__ StateWriter(float* rows, int first, int col0, int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int tile = first % 4 ^ i;
      const int number = sizeof(In) == 2 ? lane % 4 * 8 + tile / 2 * 4 : tile * 8 + lane % 4 * 2;
      at[i] = rows + first / 4 * kBox + boxed<float>(col0 + lane / 4, number);
    }
  }

  // Two numbers of tile n, and of tile n + 1 where it is there, for rows 8 row_tile to + 7.
  template <int kProducts>
  __device__ __forceinline__ void write(int row_tile, int n, const float (&x)[2][2],
                                        bool both) const {
    float y[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++)
      y[i / 2][i % 2] =
          kProducts == kOne ? __uint_as_float(nearest(x[i / 2][i % 2])) : x[i / 2][i % 2];
    const int row = row_tile * 8 * 32;
    float* const to = at[n % 4] + row + n / 4 * kBox;
    if (sizeof(In) == 2 && both) {
      *reinterpret_cast<float4*>(to) = {y[0][0], y[0][1], y[1][0], y[1][1]};
    } else {
      *reinterpret_cast<float2*>(to) = {y[0][0], y[0][1]};
      if (both)
        *reinterpret_cast<float2*>(at[(n + 1) % 4] + row + (n + 1) / 4 * kBox) = {y[1][0], y[1][1]};
    }
  }
};

template <int kBox>
struct StateReader {
  Rows<float, kBox> rows;

  template <int kProducts>
  __device__ __forceinline__ void load_right(Four<kProducts> (&to)[2], int n, int k) const {
#pragma unroll
    for (int i = 0; i < 2; i++) to[i].set_nearest(rows.read(n + i, k).x);
  }
};
