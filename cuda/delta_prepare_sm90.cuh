// What the delta rule needs of a chunk before any state is known, made by a warpgroup of sm_90a:
//
//   inverse = (I + A)^-1,  A_ij = beta_i D_ij k_i . k_j for j < i
//   scores_ij = scale D_ij q_i . k_j for j <= i
//
// with D_ij = gate_{j+1} ... gate_i. The inverse is found by substitution, in float32 inside blocks
// of 16 x 16; from block to block products are of numbers with 8 bits, or 16 where keys are much
// alike. Warp r has the rows of block r. Warp 0, which has the shortest ones, weighs the tokens of
// the next chunk meanwhile.
#pragma once
#include "delta_feed_sm90.cuh"

constexpr float kStrained = 24;          // sum of squares of 16 rows of A, from which on they are
constexpr float kGrowing = 1.0005f;      // that a state may grow by in a token, beside its gate
constexpr float kStrainSteps = 1 << 10;  // of which sums of squares are counted

// Addresses are found anew wherever they are needed: they would take registers meanwhile.
template <class S, int kStages, bool kNormalise, bool kPieces>
struct Preparer {
  Shared<S, kStages>& shared;
  const CallArgs& a;
  const DeltaPieceArgs& cut;
  unsigned group, r, lane;  // without a sign, so that quotients are shifts
  unsigned at;              // which chunk of the block; every kPreparers'th is this group's

  // Makes the tables of its chunks.
  __device__ __forceinline__ void walk(const TensorMap& q_map, const TensorMap& k_map) {
#pragma unroll 1
    for (int pass = 0;; pass++) {
      fresh().begin(q_map, k_map);
#pragma unroll 1
      for (; cursor().index >= 0; at += S::kPreparers) {
        if (!kAhead) fresh().load(at, q_map, k_map);
        shared.loaded[stage()].wait(parity());
        fresh().clear_rest();
        fresh().make(q_map, k_map);
        __syncwarp();
        if (lane == 0) shared.prepared[stage()].arrive();
      }
      if (!kPieces || pass > 0 || !once_more(shared)) break;
    }
  }

 private:
  // Whether q and k of a group's next chunk are asked for while it works on one.
  static constexpr bool kAhead = S::kPreparers == 1;

  __device__ __forceinline__ void begin(const TensorMap& q_map, const TensorMap& k_map) const {
    const unsigned done = kPieces ? shared.done : 0;
    __syncwarp();
    if (lane == 0) cursor() = first_cursor(a, cut, warm(), at - done);
    __syncwarp();
    Fetched gate;
    gate.fetch(a, cursor(), r, lane);
    fresh().put_gate(gate);
    meet();
    if (!kNormalise) {
      if (r == 0) fresh().weigh_tokens(at);
      meet();
    }
    if (kAhead) fresh().load(at, q_map, k_map);
  }
  __device__ __forceinline__ int warm() const { return kPieces ? shared.warm_chunks : 0; }
  __device__ __forceinline__ Cursor& cursor() const { return shared.cursors[4 * group + r]; }
  __device__ __forceinline__ void move() const {
    __syncwarp();
    if (lane == 0) advance(cursor(), a, cut, warm(), S::kPreparers);
    __syncwarp();
  }
  // The same, of which the compiler does not know that: addresses are worked out anew, where they
  // would take registers meanwhile.
  __device__ __forceinline__ Preparer fresh() const {
    return {shared, a, cut, afresh(group), afresh(r), afresh(lane), afresh(at)};
  }
  __device__ __forceinline__ unsigned stage() const { return at % kStages; }
  __device__ __forceinline__ unsigned parity() const { return at / kStages % 2; }
  __device__ __forceinline__ PreparedChunk& to() const { return shared.tables[stage()]; }
  __device__ __forceinline__ Rests& rests() const { return shared.rests[group]; }
  __device__ __forceinline__ Strain& strain() const { return shared.strain[stage()]; }
  __device__ __forceinline__ TokenDecays& decays() const { return shared.decays[group]; }
  __device__ __forceinline__ TokenWeights& weights(unsigned chunk) const {
    return shared.weights[chunk % S::kWeights];
  }
  __device__ __forceinline__ unsigned short* queries() const { return shared.stages[stage()]; }
  __device__ __forceinline__ unsigned short* keys() const { return queries() + S::kQuery; }
  __device__ __forceinline__ void meet() const { sync_threads<kGroup>(group + 1); }
  // Until nobody reads the rests of this group's last chunk any longer.
  __device__ __forceinline__ void wait_for_rests() const {
    const unsigned before = at + 2 * kStages - S::kPreparers;
    shared.free[before % kStages].wait(before / kStages % 2);
  }

  // Of this group's next chunk, where the whole group finds it after meeting.
  __device__ __forceinline__ void put_gate(const Fetched& gate) const {
    float* const to = lane / 16 ? decays().beta : decays().gate;
    to[r * kBlock + lane % 16] = gate.value(a, lane);
  }
  // Has q and k copied of the chunk at the cursor, by warp 0, once nobody reads what was there.
  __device__ __forceinline__ void load(unsigned chunk, const TensorMap& q_map,
                                       const TensorMap& k_map) const {
    const Cursor& at = cursor();
    const unsigned slot = chunk % kStages;
    Barrier& barrier = shared.loaded[slot];
    if (!kAhead) shared.free[slot].wait(chunk / kStages % 2 ^ 1);
    if (r > 0 || lane > 0 || at.index < 0) return;
    if (kAhead) shared.free[slot].wait(chunk / kStages % 2 ^ 1);
    barrier.arrive_and_expect(2 * 2 * S::kQuery);
    unsigned short* const q = shared.stages[slot];
#pragma unroll 1
    for (int i = 0; i < S::kKeyTiles; i++) {
      load_tile(q + S::kQuery + i * kTile, k_map, i * 64, at.hq, at.token(), at.b, barrier);
      load_tile(q + i * kTile, q_map, i * 64, at.hq, at.token(), at.b, barrier);
    }
  }
  // Keys of the next sequence, which may be NaN.
  __device__ __forceinline__ void clear_rest() const {
    const int stop = cursor().stop, left = stop - cursor().token();
    if (__builtin_expect(left >= kChunk || stop >= a.T, 1)) return;
#pragma unroll 1
    for (int i = 0; i < S::kKeyTiles; i++)
#pragma unroll 1
      for (unsigned e = max(left, static_cast<int>(r) * kBlock) * 64 + lane;
           e < (r + 1) * (kBlock * 64); e += 32)
        keys()[i * kTile + e] = 0;
    fence_shared();
    meet();
  }

  // What makes queries and keys of unit length, to where weigh_tokens finds it.
  __device__ __forceinline__ void find_units() const {
    const unsigned row = r * kBlock + lane / 2;
    const float q = unit_factor(queries(), row, lane % 2), k = unit_factor(keys(), row, lane % 2);
    if (lane % 2 == 0) decays().query[row] = q, decays().row[row] = k;
    meet();
  }
  // Of one row, by two lanes.
  static __device__ __forceinline__ float unit_factor(const unsigned short* tiles, unsigned row,
                                                      unsigned odd) {
    float sum = 0;
#pragma unroll 1
    for (int i = 0; i < S::kKeyTiles; i++)
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const unsigned short* const at = tiles + i * kTile + swizzled(row, 2 * n + odd);
        const uint4 x = *reinterpret_cast<const uint4*>(at);
        const unsigned two[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float low = bfloat16_bits_to_float(two[j] & 0xffff);
          const float high = bfloat16_bits_to_float(two[j] >> 16);
          sum += low * low + high * high;
        }
      }
    return rsqrtf(sum + __shfl_xor_sync(0xffffffffu, sum, 1) + 1e-6f);
  }

  // By one warp, two tokens a lane.
  __device__ __forceinline__ void weigh_tokens(unsigned chunk) const {
    TokenDecays& d = decays();
    const auto get = [&](const float* from) {
      return *reinterpret_cast<const float2*>(from + 2 * lane);
    };
    const auto put = [&](float* to, float x, float y) {
      *reinterpret_cast<float2*>(to + 2 * lane) = {x, y};
    };
    const float2 gate = get(d.gate), beta = get(d.beta);
    const float scale = static_cast<float>(a.scale);
    float2 query = {scale, scale}, key = {1, 1};
    if (kNormalise) {
      const float2 units = get(d.query);
      query = {scale * units.x, scale * units.y}, key = get(d.row);
    }
    float peak = fmaxf(1.f, fabsf(gate.x)) * fmaxf(1.f, fabsf(gate.y));  // NaN counts as 1
    if (__any_sync(0xffffffffu, peak > 1.f))
#pragma unroll 1
      for (int step = 1; step < 32; step *= 2) peak *= __shfl_xor_sync(0xffffffffu, peak, step);
    const bool wild = peak > kWildProduct;
    float in0 = gate.x, in1 = gate.y, end0 = key.x, end1 = key.y;
    put(d.in[0], in0, in1);
    put(d.to_end[0], end0, end1);
    put(d.row, beta.x * key.x, beta.y * key.y);
    put(d.query, query.x, query.y);
    float all = bound(in0 * in1, wild);
    in1 = all, end0 = bound(gate.y * end0, wild);
#pragma unroll 1
    for (int level = 1; level < kLevels; level++) {
      put(d.in[level], in0, in1);
      put(d.to_end[level], end0, end1);
      const int step = 1 << (level - 1);
      const float other = __shfl_xor_sync(0xffffffffu, all, step);
      const bool later = lane & step;
      const float before = later ? other : 1.f, after = later ? 1.f : other;
      in0 *= before, in1 *= before, end0 *= after, end1 *= after, all *= other;
      if (__builtin_expect(wild, 0)) {
        in0 = bounded(in0), in1 = bounded(in1), all = bounded(all);
        end0 = bounded(end0), end1 = bounded(end1);
      }
    }
    TokenWeights& w = weights(chunk);
    put(w.beta, beta.x, beta.y);
    put(w.from, in0 * key.x, in1 * key.y);
    put(w.out, in0 * query.x, in1 * query.y);
    put(w.to_end, end0, end1);
    if (lane == 0) w.whole = all, w.wild = wild;
  }
  static __device__ __forceinline__ float bound(float x, bool wild) {
    return wild ? bounded(x) : x;
  }

  // If keys are much alike, all of it once more, with 16 bits of each number.
  __device__ __forceinline__ void make(const TensorMap& q_map, const TensorMap& k_map) const {
    float x[32];
    Fetched gate;
    fresh().multiply_tiles(x, keys());
    fresh().move();
    gate.fetch(a, cursor(), r, lane);
    if (kNormalise) {
      fresh().find_units();
      if (r == 0) fresh().weigh_tokens(at);
      meet();
    }
    const bool wild = weights(at).wild;
    wgmma_wait<0>();
    settle(x);
    const float squares = fresh().template weigh_row<true>(x);
    if (lane == 0) strain().rows[r] = wild;
    if (!wild && strained(squares) && lane == 0) strain().rows[r] = 1;
    if (kAhead) fresh().load(at + 1, q_map, k_map);
    fresh().multiply_tiles(x, queries());
    fresh().invert_diagonal();
    wgmma_wait<0>();
    settle(x);
    fresh().template weigh_row<false>(x);
    put_gate(gate);
    meet();
    const bool careful = strain().any();
    if (__builtin_expect(careful, 0)) fresh().make_blocks();
    if (!kNormalise && r == 0) fresh().weigh_tokens(at + S::kPreparers);
    if (__builtin_expect(careful, 0))
      fresh().complete_carefully(fresh().weights(at).wild);
    else
      fresh().complete();
    fence_shared();
  }

  // Once more, with what is rounded off.
  __device__ __forceinline__ void make_blocks() const {
    const bool wild = weights(at).wild;
    wait_for_rests();
    fresh().template make_row<true>(r, wild);
    fresh().invert_carefully(wild);
    fresh().template make_row<false>(kBlocks - 1 - r, wild);
    meet();
  }

  // x = the rows of tiles times keys, under way
  __device__ __forceinline__ void multiply_tiles(float (&x)[32], const unsigned short* rows) const {
    const unsigned long long left = factor(rows), right = factor(keys());
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < S::kDim / 16; i++) {
      const int step = i / 4 * kTile + i % 4 * 16;
      wgmma<false>(x, later(left, step), later(right, step), i == 0);
    }
    wgmma_commit();
  }
  // This warp's row of blocks, of A (below the diagonal rounded, on it as it is; returns this
  // lane's sum of their squares) or of the scores, from products of its tokens. Nothing is kept
  // from overflow.
  template <bool kErrors>
  __device__ __forceinline__ float weigh_row(const float (&all)[32]) const {
    const TokenDecays& d = decays();
    float near[2], far[2], x[2][4], squares = 0;
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const unsigned t = r * kBlock + lane / 4 + 8 * n;
      const float own = kErrors ? d.row[t] : d.query[t];
      near[n] = own * d.in[4][t];
      far[n] = own * d.in[5][t];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) x[i / 4][i % 4] = all[i];
#pragma unroll
    for (unsigned c = 1; c < kBlocks; c++)
      if (r >= c) {
        const bool apart = (r ^ (c - 1)) & 2;
        const float* const col = d.to_end[apart ? 5 : 4] + (c - 1) * kBlock + lane % 4 * 2;
        const float by[2] = {apart ? far[0] : near[0], apart ? far[1] : near[1]};
        weigh<false>(x, by, col);
        if (kErrors) squares += sum_squares(x);
        unsigned high[4];
        pack_left(high, x);
        if (kErrors)
          put_compact(compact(r, c - 1), high);
        else
          put_block(to().scores, r, c - 1, high);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i / 4][i % 4] = all[8 * c + i];
      }
    weigh_diagonal<false, kErrors>(x, r);
    if (kErrors) {
      put_diagonal(x, r);
      return squares + sum_squares(x);
    }
    unsigned high[4];
    pack_left(high, x);
    put_block(to().scores, r, r, high);
    return 0;
  }
  static __device__ __forceinline__ float sum_squares(const float (&x)[2][4]) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) squares += x[i / 4][i % 4] * x[i / 4][i % 4];
    return squares;
  }
  __device__ __forceinline__ void put_diagonal(const float (&x)[2][4], unsigned row) const {
    float* const block =
        reinterpret_cast<float*>(scratch(row)) + lane / 4 * kDiagonalRow + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; i++)
      *reinterpret_cast<float2*>(block + i % 2 * (8 * kDiagonalRow) + i / 2 * 8) = {
          x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]};
  }

  // While the inverse is being made, its place holds blocks of A on the diagonal, as float32
  // numbers and then inverted, and those below it.
  __device__ __forceinline__ unsigned short* scratch(unsigned row) const {
    return to().inverse + row * (2 * kBlock * kDiagonalRow);
  }
  __device__ __forceinline__ unsigned short* compact(unsigned row, unsigned c) const {
    return to().inverse + kBlocks * (2 * kBlock * kDiagonalRow) +
           (row * (row - 1) / 2 + c) * (kBlock * kBlock);
  }
  __device__ __forceinline__ void put_compact(unsigned short* block, const unsigned (&x)[4]) const {
    stmatrix_x4(block + 8 * lane, x[0], x[1], x[2], x[3]);
  }
  __device__ __forceinline__ void get_compact(unsigned (&x)[4], const unsigned short* block) const {
    ldmatrix_x4(x, block + 8 * lane);
  }
  // Where this lane's row of block (row, c) of a tile begins, for stmatrix.
  __device__ __forceinline__ int place(unsigned row, unsigned c) const {
    return row * (kBlock * 64) + swizzled(lane % 16, 2 * c + lane / 16);
  }
  __device__ __forceinline__ void put_block(unsigned short* tile, unsigned row, unsigned c,
                                            const unsigned (&x)[4]) const {
    stmatrix_x4(tile + place(row, c), x[0], x[1], x[2], x[3]);
  }

  // The same with what is rounded off, block by block.
  template <bool kErrors>
  __device__ __forceinline__ void make_row(unsigned row, bool wild) const {
    unsigned left[S::kDim / 16][4];
    const unsigned short* const from = (kErrors ? keys() : queries()) + row * (kBlock * 64);
#pragma unroll
    for (int i = 0; i < S::kDim / 16; i++)
      ldmatrix_x4(left[i], from + i / 4 * kTile + (swizzled(lane % 16, lane / 16) ^ i % 4 * 16));
    const TokenDecays& d = decays();
    float near[2], far[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const unsigned t = row * kBlock + lane / 4 + 8 * n;
      const float own = kErrors ? d.row[t] : d.query[t];
      near[n] = bound(own * d.in[4][t], wild);
      far[n] = bound(own * d.in[5][t], wild);
    }
#pragma unroll 1
    for (unsigned c = 0; c <= row; c++) {
      float x[2][4];
      multiply_block(x, left, c);
      if (c < row) {
        const bool apart = (row ^ c) & 2;
        const float* const col = d.to_end[apart ? 5 : 4] + c * kBlock + lane % 4 * 2;
        const float by[2] = {apart ? far[0] : near[0], apart ? far[1] : near[1]};
        if (wild)
          weigh<true>(x, by, col);
        else
          weigh<false>(x, by, col);
      } else if (wild) {
        weigh_diagonal<true, kErrors>(x, row);
      } else {
        weigh_diagonal<false, kErrors>(x, row);
      }
      if (kErrors && c == row) {
        put_diagonal(x, row);
        continue;
      }
      Split both;
      both.set(x);
      if (kErrors) {
        put_compact(compact(row, c), both.high);
        put_low(c, both.low);
      } else {
        put_block(to().scores, row, c, both.high);
        rests().scores[lower(row, c)][lane] = left_as_right_transposed(both.low);
      }
    }
  }
  // x = the rows at hand times keys of block c
  __device__ __forceinline__ void multiply_block(float (&x)[2][4],
                                                 const unsigned (&left)[S::kDim / 16][4],
                                                 unsigned c) const {
    const unsigned short* const right = keys() + c * (kBlock * 64);
    const unsigned own = swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    float odd[2][4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) x[i / 4][i % 4] = 0;
#pragma unroll
    for (int i = 0; i < S::kDim / 16; i += 4) {
      unsigned b[4][4];
#pragma unroll
      for (int n = 0; n < 4; n++) ldmatrix_x4(b[n], right + i / 4 * kTile + (own ^ n * 16));
#pragma unroll
      for (int n = 0; n < 4; n++) multiply(n % 2 ? odd : x, left[i + n], b[n]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) x[i / 4][i % 4] += odd[i / 4][i % 4];
  }

  // Products of tokens of two blocks times what rows and columns are weighed with.
  template <bool kWild>
  static __device__ __forceinline__ void weigh(float (&x)[2][4], const float (&by)[2],
                                               const float* col) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float2 end = *reinterpret_cast<const float2*>(col + half * 8);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float* const two = x[half] + 2 * n;
        two[0] = times<kWild>(times<kWild>(by[n], end.x), two[0]);
        two[1] = times<kWild>(times<kWild>(by[n], end.y), two[1]);
      }
    }
  }
  // The same inside a block. What lies above the diagonal may be anything, NaN too: it is not
  // multiplied away.
  template <bool kWild, bool kErrors>
  __device__ __forceinline__ void weigh_diagonal(float (&x)[2][4], unsigned row) const {
    const TokenDecays& d = decays();
    const unsigned i = lane / 4, t = row * kBlock;
    const float* const own = (kErrors ? d.row : d.query) + t + i;
    const float by[2] = {own[0], own[8]};
    const float across = times<kWild>(by[1], d.in[3][t + i + 8]);
    const float2 end = *reinterpret_cast<const float2*>(d.to_end[3] + t + lane % 4 * 2);
    x[0][2] = times<kWild>(times<kWild>(across, end.x), x[0][2]);
    x[0][3] = times<kWild>(times<kWild>(across, end.y), x[0][3]);
    x[1][0] = x[1][1] = 0;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const unsigned j = lane % 4 * 2 + e, differ = i ^ j,
                     level = differ < 2 ? 0 : (differ < 4 ? 1 : 2);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float& p = x[n][2 * n + e];
        const float in = j < i ? times<kWild>(by[n], d.in[level][t + 8 * n + i]) : by[n];
        const float w = times<kWild>(in, d.to_end[level][t + 8 * n + j]);
        if (kErrors && i == j && !(fabsf(1 - w * p) <= kGrowing))
          shared.grows[static_cast<int>(at) >= warm()] = 1;
        p = j < i + !kErrors ? times<kWild>(w, p) : 0.f;
      }
    }
  }
  // Whether rows of A are long.
  static __device__ __forceinline__ bool strained(float squares) {
    const int steps = static_cast<int>(fminf(squares, 2 * kStrained) * kStrainSteps);
    return __reduce_add_sync(0xffffffffu, steps) > static_cast<int>(kStrained * kStrainSteps);
  }

  // (I + A)^-1 of the block on the diagonal.
  __device__ __forceinline__ void invert_diagonal() const {
    float* const block = reinterpret_cast<float*>(scratch(r));
    float x[kBlock], inverse[2][4];
    unsigned high[4];
    __syncwarp();
    substitute(x, block);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kBlock; i++)
      if (i / 8 == lane / 16) block[i * kDiagonalRow + lane % 16] = x[i];
    get_inverse(inverse);
    pack_left(high, inverse);
    put_compact(scratch(r), high);
  }
  // The same with what is rounded off.
  __device__ __forceinline__ void invert_carefully(bool wild) const {
    float inverse[2][4];
    Split both;
    __syncwarp();
    substitute_carefully(reinterpret_cast<float*>(scratch(r)), wild);
    get_inverse(inverse);
    both.set(inverse);
    put_compact(scratch(r), both.high);
    put_compact(scratch(r) + kBlock * kBlock, both.low);
    put_low(r, both.low);
  }
  // From float32 numbers, which may be overwritten then.
  __device__ __forceinline__ void get_inverse(float (&inverse)[2][4]) const {
    const float* const own =
        reinterpret_cast<const float*>(scratch(r)) + lane / 4 * kDiagonalRow + lane % 4 * 2;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 two =
          *reinterpret_cast<const float2*>(own + i % 2 * (8 * kDiagonalRow) + i / 2 * 8);
      inverse[i / 2][i % 2 * 2] = two.x, inverse[i / 2][i % 2 * 2 + 1] = two.y;
    }
    __syncwarp();
  }

  // A column a lane, row by row.
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
        x[i] -=
            (j % 4 == 0 ? four.x : (j % 4 == 1 ? four.y : (j % 4 == 2 ? four.z : four.w))) * x[j];
      }
    }
  }
  // The same in little code, each row in place of that of A; rows to come are passed on by one.
  __device__ __forceinline__ void substitute_carefully(float* block, bool wild) const {
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; i++) x[i] = lane % 16 == i ? 1.f : 0.f;
#pragma unroll 1
    for (int i = 0; i < kBlock; i++) {
      const float own = x[0];
#pragma unroll
      for (int n = 1; n < kBlock; n++) {
        const float a = i + n < kBlock ? block[(i + n) * kDiagonalRow + i] : 0.f;
        x[n - 1] = wild ? tame(x[n] - tame(a * own)) : x[n] - a * own;
      }
      __syncwarp();
      if (lane < kBlock) block[i * kDiagonalRow + lane] = own;
    }
  }

  // From the diagonal to the left: T_rc = -(sum over c < m <= r of T_rm A_mc) T_cc, c = r - d.
  __device__ __forceinline__ void complete() const {
    unsigned t0[4], t1[4] = {}, t2[4] = {}, t3[4] = {};
    get_compact(t0, scratch(r));
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
      if (c > r) put_block(to().inverse, r, c, zeros);
    put_block(to().inverse, r, r, t0);
    if (r >= 1) put_block(to().inverse, r, r - 1, t1);
    if (r >= 2) put_block(to().inverse, r, r - 2, t2);
    if (r >= 3) put_block(to().inverse, r, r - 3, t3);
  }
  // Block (row, c) as the right factor of mma.
  __device__ __forceinline__ void get(unsigned (&x)[4], unsigned row, unsigned c) const {
    ldmatrix_x4<true>(x, (c == row ? scratch(row) : compact(row, c)) + 8 * lane);
  }
  // sum += x A, A's block (r - e, c)
  __device__ __forceinline__ void add(float (&sum)[2][4], const unsigned (&x)[4], unsigned e,
                                      unsigned c) const {
    unsigned right[4];
    get(right, r - e, c);
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
  __device__ __forceinline__ void complete_carefully(bool wild) const {
    Split t[kBlocks] = {};  // from the diagonal to the left
    get_compact(t[0].high, scratch(r));
    get_compact(t[0].low, scratch(r) + kBlock * kBlock);
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
  __device__ __forceinline__ void put_low(unsigned c, const unsigned (&x)[4]) const {
    unsigned b[4];
    left_as_right(b, x);
    rests().inverse[lower(r, c)][lane] = {b[0], b[1], b[2], b[3]};
  }
  // sum += x (block (r - e, c) of A, or of the inverse on the diagonal)
  __device__ __forceinline__ void add(float (&sum)[2][4], const Split& x, unsigned e, unsigned c,
                                      bool wild) const {
    unsigned right[4];
    const uint4 low = rests().inverse[lower(r - e, c)][lane];
    multiply(sum, x.high, {low.x, low.y, low.z, low.w});
    get(right, r - e, c);
    multiply(sum, x.low, right);
    multiply(sum, x.high, right);
    if (wild)
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i / 4][i % 4] = tame(sum[i / 4][i % 4]);
  }
};
