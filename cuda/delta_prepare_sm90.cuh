// What the delta rule needs of a chunk before any state is known, made by a warpgroup of sm_90a:
//
//   inverse = (I + A)^-1,  A_ij = beta_i D_ij k_i . k_j for j < i
//   scores_ij = scale D_ij q_i . k_j for j <= i
//
// with D_ij = gate_{j+1} ... gate_i (decay.cuh). The inverse is found by substitution, in float32
// inside blocks of 16 x 16; from block to block products are of numbers with 8 bits, or 16 where
// keys are much alike. Warp r has the rows of block r.
#pragma once
#include "delta_feed_sm90.cuh"

constexpr float kStrained = 24;          // sum of squares of 16 rows of A, from which on they are
constexpr float kGrowing = 1.01f;        // that a state may grow by in a token, beside its gate
constexpr float kStrainSteps = 1 << 10;  // of which sums of squares are counted

// Addresses are found anew wherever they are needed: they would take registers meanwhile.
template <class S, int kStages>
struct Preparer {
  Shared<S, kStages>& shared;
  int r, lane;
  unsigned at;  // which chunk of the block; every second one is this group's

  // Makes the tables of every second chunk.
  __device__ __forceinline__ void walk() {
    const volatile unsigned& chunks = shared.chunks;
#pragma unroll 1
    for (; at < chunks; at += kPreparers) {
      make();
      if (lane == 0) shared.prepared[table()].arrive();
    }
  }

 private:
  __device__ __forceinline__ void make() const {
    float scores[32], diagonal[2][4];
    // parity tells a phase from the next one only, and what was there before may be the other
    // group's
    if (kStages % kPreparers && at > 0) wait_for(at - 1);
    wait_for(at);
    fresh().put_errors();
    fresh().invert_diagonal(diagonal);
    unsigned rounded[4];
    pack_left(rounded, diagonal);
    put_block(to().scores, r, rounded);
    meet();
    if (__builtin_expect(strain().any(), 0)) {
      wait_for_rests();
      fresh().complete_carefully(diagonal);
      fresh().multiply_rows(scores, queries(), keys());
      wgmma_wait<0>();
      settle(scores);
      fresh().template weigh<true, false>(scores);
      fresh().template put_scores<true>(scores);
    } else {
      fresh().multiply_rows(scores, queries(), keys());
      fresh().complete(rounded);
      wgmma_wait<0>();
      settle(scores);
      fresh().template weigh<false, false>(scores);
      fresh().template put_scores<false>(scores);
    }
    fence_shared();
    __syncwarp();
  }

  __device__ __forceinline__ void wait_for(unsigned chunk) const {
    shared.loaded[chunk % kStages].wait(chunk / kStages % 2);
    shared.weighed[chunk % kStages].wait(chunk / kStages % 2);
  }
  // The same, of which the compiler does not know that: addresses are worked out anew, where they
  // would take registers meanwhile.
  __device__ __forceinline__ Preparer fresh() const {
    return {shared, forget(r), forget(lane), static_cast<unsigned>(forget(at))};
  }
  __device__ __forceinline__ unsigned stage() const { return at % kStages; }
  __device__ __forceinline__ unsigned table() const { return at % kTables; }
  __device__ __forceinline__ PreparedChunk& to() const { return shared.tables[table()]; }
  __device__ __forceinline__ Rests& rests() const { return shared.rests[at % kPreparers]; }
  __device__ __forceinline__ Strain& strain() const { return shared.strain[table()]; }
  __device__ __forceinline__ const TokenWeights& weights() const { return shared.weights[stage()]; }
  __device__ __forceinline__ const unsigned short* queries() const {
    return shared.stages[stage()];
  }
  __device__ __forceinline__ const unsigned short* keys() const { return queries() + S::kQuery; }
  __device__ __forceinline__ void meet() const { sync_threads<kGroup>(at % kPreparers + 2); }
  // Until nobody reads the rests of the chunk before the last one any longer.
  __device__ __forceinline__ void wait_for_rests() const {
    const unsigned before = at + 2 * kTables - kPreparers;
    shared.tables_free[before % kTables].wait(before / kTables % 2);
  }

  __device__ __forceinline__ float* scratch() const {  // 16 rows of kDiagonalRow numbers
    return reinterpret_cast<float*>(to().inverse) + r * (kBlock * kDiagonalRow);
  }
  // Where this lane's row of block (r, c) begins, for stmatrix and for ldmatrix.
  __device__ __forceinline__ int place(int c) const {
    return r * (kBlock * 64) + swizzled(lane % 16, 2 * c + lane / 16);
  }
  __device__ __forceinline__ void put_block(unsigned short* tile, int c,
                                            const unsigned (&x)[4]) const {
    stmatrix_x4(tile + place(c), x[0], x[1], x[2], x[3]);
  }
  // Block (r - e, c) as the right factor of mma.
  __device__ __forceinline__ void get(unsigned (&x)[4], const unsigned short* tile, int e,
                                      int c) const {
    ldmatrix_x4<true>(x, tile + place(c) - e * (kBlock * 64));
  }

  // d = a b^T for the 64 rows of each, begun and not waited for.
  static __device__ __forceinline__ void multiply_rows(float (&d)[32], const unsigned short* a,
                                                       const unsigned short* b) {
    const unsigned long long left = factor(a), right = factor(b);
    settle(d);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < S::kDim / 16; i++) {
      const int step = i / 4 * kTile + i % 4 * 16;
      wgmma<false>(d, later(left, step), later(right, step), i == 0);
    }
    wgmma_commit();
  }

  // A below the diagonal, rounded, to where the scores will lie, with what is rounded off where
  // rests of scores will lie; on the diagonal, as it is, to the scratch.
  __device__ __forceinline__ void put_errors() const {
    float kk[32];
    multiply_rows(kk, keys(), keys());
    wgmma_wait<0>();
    settle(kk);
    const bool wild = weights().decay.wild;
    if (__builtin_expect(wild, 0))
      weigh<true, true>(kk);
    else
      weigh<false, true>(kk);
    const bool careful = wild || strained(kk);
    shared.tables_free[table()].wait(at / kTables % 2 ^ 1);
    if (lane == 0) strain().rows[r] = careful;
    if (__builtin_expect(careful, 0)) wait_for_rests();
    fresh().put_rows(kk, careful);
  }
  __device__ __forceinline__ void put_rows(const float (&kk)[32], bool careful) const {
    float* const block = scratch() + lane / 4 * kDiagonalRow + lane % 4 * 2;
#pragma unroll
    for (int c = 0; c < kBlocks; c++) {
      const float* const x = kk + 8 * c;
      if (c < r) {
        const unsigned a[4] = {pack_bfloat16(x[0], x[1]), pack_bfloat16(x[2], x[3]),
                               pack_bfloat16(x[4], x[5]), pack_bfloat16(x[6], x[7])};
        put_block(to().scores, c, a);
      } else if (c == r) {
#pragma unroll
        for (int i = 0; i < 4; i++)
          *reinterpret_cast<float2*>(block + i % 2 * (8 * kDiagonalRow) + i / 2 * 8) = {
              x[2 * i], x[2 * i + 1]};
      }
    }
    if (__builtin_expect(careful, 0))
#pragma unroll
      for (int c = 0; c < kBlocks - 1; c++)
        if (c < r) put_low(c, split(kk + 8 * c).low);
  }

  // Products of rows with keys times their decays: A with weights().row, below the diagonal, or
  // scores with weights().query, on it too. What lies above may be anything, NaN too: it is not
  // multiplied away.
  template <bool kWild, bool kErrors>
  __device__ __forceinline__ void weigh(float (&x)[32]) const {
    const Decay& decay = weights().decay;
    const int g = lane / 4, j = lane % 4 * 2;
    const float* const own = (kErrors ? weights().row : weights().query) + r * kBlock + g;
    const float4 b = *reinterpret_cast<const float4*>(decay.between[r]);
    const float between[kBlocks] = {b.x, b.y, b.z, b.w};
    float from[2], diagonal[8];
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const int half = n / 2, low = n % 2;
      if (half == 0)
        from[low] = times<kWild>(own[8 * low], decay.in_block[r * kBlock + g + 8 * low]);
      const float2 d =
          *reinterpret_cast<const float2*>(decay.diagonal[r][g + 8 * low] + half * 8 + j);
      diagonal[2 * n] = times<kWild>(own[8 * low], d.x);
      diagonal[2 * n + 1] = times<kWild>(own[8 * low], d.y);
    }
#pragma unroll
    for (int c = 0; c < kBlocks; c++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 col =
            *reinterpret_cast<const float2*>(decay.to_block_end + c * kBlock + half * 8 + j);
#pragma unroll
        for (int low = 0; low < 2; low++) {
          const int n = 2 * half + low, at = g + low * 8 + (r - c) * kBlock, to = half * 8 + j;
          const float w = times<kWild>(between[c], from[low]);
          const float w0 = c == r ? diagonal[2 * n] : times<kWild>(w, col.x);
          const float w1 = c == r ? diagonal[2 * n + 1] : times<kWild>(w, col.y);
          float* const two = x + c * 8 + n * 2;
          if (kErrors && half == low && c == r && lane % 4 == g / 2 &&
              !(fabsf(1 - (g % 2 ? w1 * two[1] : w0 * two[0])) <= kGrowing))
            shared.grows[at >= static_cast<unsigned>(shared.warm_chunks)] = 1;
          two[0] = to + kErrors <= at ? times<kWild>(w0, two[0]) : 0.f;
          two[1] = to + 1 + kErrors <= at ? times<kWild>(w1, two[1]) : 0.f;
        }
      }
  }
  // Whether rows of A are long.
  static __device__ __forceinline__ bool strained(const float (&a)[32]) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) squares += a[i] * a[i];
    const int steps = static_cast<int>(fminf(squares, 2 * kStrained) * kStrainSteps);
    return __reduce_add_sync(0xffffffffu, steps) > static_cast<int>(kStrained * kStrainSteps);
  }

  // Weighed scores, with their rests or without.
  template <bool kRests>
  __device__ __forceinline__ void put_scores(const float (&scores)[32]) const {
#pragma unroll
    for (int c = 0; c < kBlocks; c++) {
      if (c > r) continue;
      const Split both = split(scores + 8 * c);
      put_block(to().scores, c, both.high);
      if (kRests) rests().scores[lower(r, c)][lane] = left_as_right_transposed(both.low);
    }
  }

  // (I + A)^-1 of the block on the diagonal, as mma leaves it.
  __device__ __forceinline__ void invert_diagonal(float (&inverse)[2][4]) const {
    float* const block = scratch();
    float x[kBlock];
    __syncwarp();
    if (__builtin_expect(weights().decay.wild, 0))
      substitute<true>(x, block);
    else
      substitute<false>(x, block);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kBlock; i++)
      if (i / 8 == lane / 16) block[i * kDiagonalRow + lane % 16] = x[i];
    __syncwarp();
    const float* const own = block + lane / 4 * kDiagonalRow + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 two =
          *reinterpret_cast<const float2*>(own + i % 2 * (8 * kDiagonalRow) + i / 2 * 8);
      inverse[i / 2][i % 2 * 2] = two.x, inverse[i / 2][i % 2 * 2 + 1] = two.y;
    }
  }

  // A column a lane, row by row.
  template <bool kWild>
  __device__ __forceinline__ void substitute(float (&x)[kBlock], const float* block) const {
#pragma unroll
    for (int i = 0; i < kBlock; i++) {
      float4 a[4];
#pragma unroll
      for (int j = 0; j < i; j += 4)
        a[j / 4] = *reinterpret_cast<const float4*>(block + i * kDiagonalRow + j);
      x[i] = lane % 16 == i ? 1.f : 0.f;
#pragma unroll
      for (int j = 0; j < i; j++) {
        const float4& four = a[j / 4];
        const float f =
            j % 4 == 0 ? four.x : (j % 4 == 1 ? four.y : (j % 4 == 2 ? four.z : four.w));
        x[i] = kWild ? tame(x[i] - tame(f * x[j])) : x[i] - f * x[j];
      }
    }
  }

  // From the diagonal to the left: T_rc = -(sum over c < m <= r of T_rm A_mc) T_cc, c = r - d.
  __device__ __forceinline__ void complete(const unsigned (&t0)[4]) const {
    unsigned t1[4], t2[4], t3[4];
    if (r >= 1) {
      float sum[2][4] = {};
      add(sum, t0, 0, r - 1);
      finish(t1, sum, 1);
    }
    if (r >= 2) {
      float sum[2][4] = {};
      add(sum, t0, 0, r - 2);
      add(sum, t1, 1, r - 2);
      finish(t2, sum, 2);
    }
    if (r >= 3) {
      float sum[2][4] = {};
      add(sum, t0, 0, r - 3);
      add(sum, t1, 1, r - 3);
      add(sum, t2, 2, r - 3);
      finish(t3, sum, 3);
    }
    put_inverse(t0, t1, t2, t3);
  }
  // Once nobody reads A any longer. Scratch has been where zeros belong.
  __device__ __forceinline__ void put_inverse(const unsigned (&t0)[4], const unsigned (&t1)[4],
                                              const unsigned (&t2)[4],
                                              const unsigned (&t3)[4]) const {
    const unsigned zeros[4] = {};
    meet();
#pragma unroll
    for (int c = 1; c < kBlocks; c++)
      if (c > r) put_block(to().inverse, c, zeros);
    put_block(to().inverse, r, t0);
    if (r >= 1) put_block(to().inverse, r - 1, t1);
    if (r >= 2) put_block(to().inverse, r - 2, t2);
    if (r >= 3) put_block(to().inverse, r - 3, t3);
  }
  // sum += x A, A's block (r - e, c)
  __device__ __forceinline__ void add(float (&sum)[2][4], const unsigned (&x)[4], int e,
                                      int c) const {
    unsigned right[4];
    get(right, to().scores, e, c);
    multiply(sum, x, right);
  }
  __device__ __forceinline__ void finish(unsigned (&t)[4], const float (&sum)[2][4], int d) const {
    unsigned left[4];
    float product[2][4] = {};
    pack_left(left, sum);
    add(product, left, d, r - d);
    pack_left(t, product);
    t[0] ^= 0x80008000u, t[1] ^= 0x80008000u, t[2] ^= 0x80008000u, t[3] ^= 0x80008000u;
  }

  // The same with 16 bits of each number.
  __device__ __forceinline__ void complete_carefully(const float (&diagonal)[2][4]) const {
    const bool wild = weights().decay.wild;
    const unsigned zeros[4] = {};
    Split t[kBlocks];  // from the diagonal to the left
    if (!strain().rows[r])
#pragma unroll
      for (int c = 0; c < kBlocks - 1; c++)
        if (c < r) put_low(c, zeros);
    t[0].set(diagonal);
    put_low(r, t[0].low);
    meet();
#pragma unroll
    for (int d = 1; d < kBlocks; d++)
      if (d <= r) {
        float sum[2][4] = {}, product[2][4] = {};
#pragma unroll
        for (int e = 0; e < d; e++) add(sum, t[e], e, r - d, wild);
        t[d].set(sum);
        add(product, t[d], d, r - d, wild);
#pragma unroll
        for (int i = 0; i < 8; i++) product[i / 4][i % 4] = -product[i / 4][i % 4];
        t[d].set(product);
      }
    put_inverse(t[0].high, t[1].high, t[2].high, t[3].high);
#pragma unroll
    for (int d = 0; d < kBlocks; d++)
      if (d <= r) rests().inverse[lower(r, r - d)][lane] = left_as_right_transposed(t[d].low);
  }
  // A block's low bits to where others find them as a right factor.
  __device__ __forceinline__ void put_low(int c, const unsigned (&x)[4]) const {
    unsigned b[4];
    left_as_right(b, x);
    rests().scores[lower(r, c)][lane] = {b[0], b[1], b[2], b[3]};
  }
  // sum += x (block (r - e, c) of A, or of the inverse on the diagonal)
  __device__ __forceinline__ void add(float (&sum)[2][4], const Split& x, int e, int c,
                                      bool wild) const {
    unsigned right[4];
    const uint4 low = rests().scores[lower(r - e, c)][lane];
    multiply(sum, x.high, {low.x, low.y, low.z, low.w});
    get(right, to().scores, e, c);
    multiply(sum, x.low, right);
    multiply(sum, x.high, right);
    if (wild)
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i / 4][i % 4] = tame(sum[i / 4][i % 4]);
  }
  static __device__ __forceinline__ Split split(const float* x) {
    Split y;
    y.set({{x[0], x[1], x[2], x[3]}, {x[4], x[5], x[6], x[7]}});
    return y;
  }
};
