// Gradients of the tokens of one chunk, once states and what was written are known; see
// delta_grad.cu. Of rows of K a warp has every other part.
#pragma once
#include "delta_grad_pairs.cuh"
#include "delta_grad_scalars.cuh"

template <int K, int V, bool kDirect>
struct TokenGradients : TokenWarp {
  using S = TokenShape<K, V>;
  const CallArgs& a;
  const GradArgs& g;
  const SlotChunk& chunk;
  long long h;  // head
  const unsigned short *q, *k, *e, *dy, *de;
  uint4* piece;
  const Decay& decay;
  TokenSums& sums;
  float scale;
  long long first_row;  // of the gradients of q and k, this head's
  int step;             // from a token to the next

  unsigned ge[S::kPieces][S::kOwn][4] = {};      // rows of (G e_j)^T, rounded, the next part first
  float edge[2] = {}, last[2] = {}, corner = 0;  // this lane's part

  // Part p of a state on its way into shared memory.
  __device__ __forceinline__ void fetch(const uint4* state, int p) const {
    const uint4* const from = state + first_of_part(p);
    uint4* const to = piece + threadIdx.x;
    each_of_part(p, [=](int n) { cp_async<16>(to + n * kTokenThreads, from + n * kNext); });
    cp_async_commit();
  }

  // G e_j of part p of G in shared memory, and k_j G e_j.
  __device__ __forceinline__ void read_late(int p) {
    float x[S::kOwn][2][4] = {};
#pragma unroll 1
    for (int v = 0; v < S::kValueTiles; v++) {
      unsigned left[4];
      load_left(left, e + r() * kBlock * S::kValueRow + v * 16, S::kValueRow, lane);
      own_tiles(p, [&](int m, int) {
        unsigned right[4];
        get(right, v, m);
        multiply(x[m], left, right);
      });
    }
    turn();
    own_tiles(p, [&](int m, int tile) {
      add_inner(last, 1, k, x[m], tile);
      pack_left(ge[S::kPieces - 1][m], x[m]);
    });
  }

  // dq and dk of the rows of K that part p of S has, S in shared memory.
  __device__ __forceinline__ void read_state(int p, const uint4* late) {
    float dq[S::kOwn][2][4] = {}, dk[S::kOwn][2][4] = {};
    uint4 of_late[kVectors];  // long before they are needed
    const uint4* const from = late + first_of_part(p);
    each_of_part(p, [&](int n) { of_late[n] = from[n * kNext]; });
#pragma unroll 1
    for (int v = 0; v < S::kValueTiles; v++) {
      unsigned by_q[4], by_k[4];
      load_left(by_q, dy + r() * kBlock * S::kValueRow + v * 16, S::kValueRow, lane);
      load_left(by_k, de + r() * kBlock * S::kValueRow + v * 16, S::kValueRow, lane);
      own_tiles(p, [&](int m, int) {
        unsigned right[4];
        get(right, v, m);
        multiply(dq[m], by_q, right);
        multiply(dk[m], by_k, right);
      });
    }
    add_corner(p, of_late);
    weigh(p, dq, dk);
#pragma unroll 1
    for (int c = 0; c < kBlocks; c++) add_pairs(p, c, dq, dk);
    own_tiles(p, [&](int m, int tile) {
      put_rows(kDirect ? g.dq : g.partial_dq, dq[m], tile);
      put_rows(kDirect ? g.dk : g.partial_dk, dk[m], tile);
    });
  }

  // Sums over K of half a row, to where the gates' gradients need them.
  __device__ __forceinline__ void put_inner(float (&to)[2][kChunk], float (&inner)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      inner[half] += __shfl_xor_sync(0xffffffffu, inner[half], 1);
      inner[half] += __shfl_xor_sync(0xffffffffu, inner[half], 2);
      if (lane % 4 == 0) to[side()][row(2 * half)] = inner[half];
    }
  }
  __device__ __forceinline__ void put_corner() {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) corner += __shfl_xor_sync(0xffffffffu, corner, step);
    if (lane == 0) sums.corner[warp] = corner;
  }

 private:
  // The vectors of part p of a state that this thread has to do with: f(which). All are of one tile
  // of rows of K: in the whole state each follows kNext after the one before, in the part
  // kTokenThreads.
  static constexpr int kAcross = 32 * S::kPieceTiles, kDown = kTokenThreads / kAcross;
  static constexpr int kVectors = (S::kValueTiles + kDown - 1) / kDown;
  static constexpr int kNext = kDown * S::kRowTiles * 32;
  static __device__ __forceinline__ int tile_of_part(int p) {
    return threadIdx.x % kAcross / 32 + p * S::kPieceTiles;
  }
  static __device__ __forceinline__ int first_of_part(int p) {
    return (threadIdx.x / kAcross * S::kRowTiles + tile_of_part(p)) * 32 + threadIdx.x % 32;
  }
  template <class F>
  static __device__ __forceinline__ void each_of_part(int p, F f) {
    static_assert(kTokenThreads % kAcross == 0, "threads are whole rows of tiles");
    if (S::kRowTiles % S::kPieceTiles != 0 && tile_of_part(p) >= S::kRowTiles) return;
#pragma unroll
    for (int n = 0; n < kVectors; n++)
      if (S::kValueTiles % kDown == 0 || threadIdx.x / kAcross + n * kDown < S::kValueTiles) f(n);
  }
  // The own tiles of 16 rows of K in part p of a state: f(which, tile).
  template <class F>
  __device__ __forceinline__ void own_tiles(int p, F f) const {
#pragma unroll
    for (int m = 0; m < S::kOwn; m++) {
      const int tile = p * S::kPieceTiles + side() * S::kOwn + m;
      if (S::kRowTiles % S::kPieceTiles == 0 || tile < S::kRowTiles) f(m, tile);
    }
  }
  __device__ __forceinline__ void get(unsigned (&right)[4], int value_tile, int m) const {
    const uint4 b = piece[(value_tile * S::kPieceTiles + side() * S::kOwn + m) * 32 + lane];
    right[0] = b.x, right[1] = b.y, right[2] = b.z, right[3] = b.w;
  }
  // The next part comes first, and the first one last.
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int i = 0; i < 4 * S::kOwn; i++) {
      const unsigned first = ge[0][i / 4][i % 4];
#pragma unroll
      for (int p = 0; p + 1 < S::kPieces; p++) ge[p][i / 4][i % 4] = ge[p + 1][i / 4][i % 4];
      ge[S::kPieces - 1][i / 4][i % 4] = first;
    }
  }

  // sums += sign x . rows, for the rows of a tile
  __device__ __forceinline__ void add_inner(float (&inner)[2], float sign,
                                            const unsigned short* rows, const float (&x)[2][4],
                                            int tile) const {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const unsigned two = *reinterpret_cast<const unsigned*>(rows + row(i) * S::kKeyRow +
                                                              tile * 16 + col(i / 4, 0));
      inner[i / 2 % 2] += sign * (bfloat16_bits_to_float(two & 0xffff) * x[i / 4][i % 4] +
                                  bfloat16_bits_to_float(two >> 16) * x[i / 4][i % 4 + 1]);
    }
  }

  // What S gives to dq and dk, and G to dk.
  __device__ __forceinline__ void weigh(int p, float (&dq)[S::kOwn][2][4],
                                        float (&dk)[S::kOwn][2][4]) {
    float start[2], end[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int t = row(2 * half);
      start[half] = decay.from_start[t];
      end[half] = times<true>(decay.to_end[t], sums.beta[t]);
    }
    own_tiles(p, [&](int m, int tile) {
      add_inner(edge, scale, q, dq[m], tile);
      add_inner(edge, -1, k, dk[m], tile);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int half = i / 2 % 2;
        const unsigned two = ge[0][m][half + i / 4 * 2];
        const float late_read = bfloat16_bits_to_float(i % 2 ? two >> 16 : two & 0xffff);
        float &x = dq[m][i / 4][i % 4], &y = dk[m][i / 4][i % 4];
        x *= times<true>(scale, start[half]);
        y = end[half] * late_read - start[half] * y;
      }
    });
    turn();
  }

  // What pairs with the tokens of block c give.
  __device__ __forceinline__ void add_pairs(int p, int c, float (&dq)[S::kOwn][2][4],
                                            float (&dk)[S::kOwn][2][4]) const {
    unsigned keys[S::kOwn][4], left[4], right[4];
    own_tiles(p, [&](int m, int tile) {
      load_right(keys[m], k + c * kBlock * S::kKeyRow + tile * 16, S::kKeyRow, lane);
    });
    if (c <= r()) {
      load_weights(left, 0, r(), c);
      own_tiles(p, [&](int m, int) { multiply(dq[m], left, keys[m]); });
      load_weights(left, 1, r(), c);
      own_tiles(p, [&](int m, int) { multiply(dk[m], left, keys[m]); });
    }
    if (c >= r()) {
      load_weights_transposed(left, 1, c, r());
      own_tiles(p, [&](int m, int) { multiply(dk[m], left, keys[m]); });
      load_weights_transposed(left, 0, c, r());
      own_tiles(p, [&](int m, int tile) {
        load_right(right, q + c * kBlock * S::kKeyRow + tile * 16, S::kKeyRow, lane);
        multiply(dk[m], left, right);
      });
    }
  }
  __device__ __forceinline__ void load_weights(unsigned (&left)[4], int which, int i, int j) const {
    ldmatrix_x4(left,
                e + which * kChunk * kChunk + twisted(i * kBlock + lane % 16, 2 * j + lane / 16));
  }
  __device__ __forceinline__ void load_weights_transposed(unsigned (&left)[4], int which, int i,
                                                          int j) const {
    ldmatrix_x4<true>(left,
                      e + which * kChunk * kChunk +
                          twisted(i * kBlock + lane % 8 + lane / 16 * 8, 2 * j + lane / 8 % 2));
  }

  __device__ __forceinline__ void put_rows(void* to, const float (&x)[2][4], int tile) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int t = row(2 * half);
      const long long row_at = first_row + static_cast<long long>(t) * step + tile * 16;
      if constexpr (kDirect && K % 4 == 0) {  // neighbours swap, for whole vectors of four
        const unsigned low = pack_bfloat16(x[0][2 * half], x[0][2 * half + 1]);
        const unsigned high = pack_bfloat16(x[1][2 * half], x[1][2 * half + 1]);
        const unsigned got = __shfl_xor_sync(0xffffffffu, lane % 2 ? low : high, 1);
        const int at = lane % 2 * 8 + lane % 4 / 2 * 4;
        if (t < chunk.tokens && (K % 16 == 0 || tile * 16 + at < K))
          ::put_two(static_cast<unsigned short*>(to) + row_at + at, lane % 2 ? got : low,
                    lane % 2 ? high : got);
        continue;
      }
      if (t >= chunk.tokens) continue;
#pragma unroll
      for (int side = 0; side < 2; side++) {
        const int at = col(side, 0);
        if (K % 16 != 0 && tile * 16 + at >= K) continue;
        put_two(to, row_at + at, x[side][2 * half], x[side][2 * half + 1],
                K % 2 == 0 || tile * 16 + at + 1 < K);
      }
    }
  }
  static __device__ __forceinline__ void put_two(void* to, long long at, float first, float second,
                                                 bool both) {
    if (kDirect && K % 2 == 0) {
      *reinterpret_cast<unsigned*>(static_cast<unsigned short*>(to) + at) =
          pack_bfloat16(first, second);
    } else if (kDirect) {
      static_cast<unsigned short*>(to)[at] = float_to_bfloat16_bits(first);
      if (both) static_cast<unsigned short*>(to)[at + 1] = float_to_bfloat16_bits(second);
    } else {
      static_cast<float*>(to)[at] = first;
      if (both) static_cast<float*>(to)[at + 1] = second;
    }
  }

  // <S, G> of part p.
  __device__ __forceinline__ void add_corner(int p, const uint4 (&of_late)[kVectors]) {
    each_of_part(p, [&](int n) {
      const uint4 x = piece[threadIdx.x + n * kTokenThreads], y = of_late[n];
      const unsigned of_x[4] = {x.x, x.y, x.z, x.w}, of_y[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int j = 0; j < 4; j++)
        corner +=
            bfloat16_bits_to_float(of_x[j] & 0xffff) * bfloat16_bits_to_float(of_y[j] & 0xffff) +
            bfloat16_bits_to_float(of_x[j] >> 16) * bfloat16_bits_to_float(of_y[j] >> 16);
    });
  }
};
