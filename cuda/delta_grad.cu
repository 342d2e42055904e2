// Gradients of the delta rule in chunks of 64 tokens on tensor cores, for bfloat16. In a chunk that
// starts from the state S and leaves one with the gradient G, D_ij = gate_{j+1} ... gate_i,
// d_i = gate_0 ... gate_i, A_ij = D_ij beta_j k_i . k_j for j < i:
//
//   E  = (I + A)^-1 (V - diag(d) K S)          S <- d_63 S + sum_j D_63,j beta_j k_j e_j^T
//   dE = (I + A)^-T (P^T dY + diag(D_63,j beta_j) K G)       P_ij = D_ij beta_j q_i . k_j for j <=
//   i G  <- d_63 G + sum_i d_i (q_i dy_i^T - k_i de_i^T)                                     dV =
//   dE
//
// where dY has the scale in it. y_i reads with x_i = q_i and e_i with x_i = -k_i, and what comes of
// them is d_i = dy_i and de_i; sums over i are over both:
//
//   dx_i    = d_i S d_i + sum_j D_ij beta_j (d_i . e_j) k_j        (dk has - dx_i of its own read)
//   dk_j    = beta_j (sum_i D_ij (d_i . e_j) x_i + D_63,j G e_j)
//   dbeta_j = sum_i D_ij M_ij + D_63,j k_j G e_j                 M_ij = (x_i . k_j) (d_i . e_j)
//   dgate_t = sum_{i >= t > j} D_it beta_j M_ij D_{t-1,j}
//             + sum_i D_it (x_i S d_i) d_{t-1} + sum_j D_63,t (beta_j k_j G e_j) D_{t-1,j}
//             + D_63,t <S, G> d_{t-1}
//
// so that no gate's gradient is a difference of sums or divided by a gate. delta_grad_prepare makes
// the inverse and P of all chunks; delta_grad_walk goes through the chunks for S and E, and in
// other blocks back for G and dE; delta_grad_tokens makes the rest, all chunks at once.
#include "delta_grad_copy.cuh"
#include "delta_grad_prepare.cuh"
#include "delta_grad_tokens.cuh"
#include "delta_grad_walk.cuh"

// grid: 2 * N * H * ceil(V / kBlockCols), forward and back by turns. block: WalkShape::kThreads.
// With kWide all rows of q, k, v and dy begin at multiples of 16 bytes and hold whole vectors of 8.
// kDirect: gradients of q, k, gate and beta are not added up by finish_grad.
template <int K, int V, int kBlockCols, int kStages, bool kWide, bool kDirect>
__global__ void __launch_bounds__(WalkShape<K, V, kBlockCols, kStages>::kThreads, 1)
    delta_grad_walk(const CallArgs a, const GradArgs g, const SpaceArgs space) {
  using S = WalkShape<K, V, kBlockCols, kStages>;
  static_assert(kBlockCols % 16 == 0, "a warp has 16 columns");
  static_assert(kStages >= 2, "one chunk at hand and one on its way");
  static_assert(!kWide || (K % 8 == 0 && V % 8 == 0), "rows of whole vectors");
  DYNAMIC_SHARED(unsigned short, shared);
  for (int i = threadIdx.x; i < kStages * S::kStage; i += S::kThreads) shared[i] = 0;  // padding

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const bool back = blockIdx.x % 2;
  const long long item = blockIdx.x / 2;
  const int col0 = static_cast<int>(item % S::kColBlocks) * kBlockCols;
  const int cols = min(kBlockCols, V - col0);
  const long long nh = item / S::kColBlocks, n = nh / a.H, h = nh % a.H;
  const Sequence seq = sequence(a, n);
  const long long b = seq.b, start = seq.start, stop = seq.stop;
  const int chunks = static_cast<int>((stop - start + kChunk - 1) / kChunk);
  const long long entry = first_slot<kChunk>(a, n) * a.H + h;
  unsigned short* const dv =
      static_cast<unsigned short*>(a.y) + b * a.y_stride[0] + h * a.y_stride[2] + col0;
  if (back && a.cu_seqlens && n == a.N - 1)
    clear_tail<K>(a, g, h, stop, dv, cols, kDirect && col0 == 0);
  __syncthreads();

  if (warp >= S::kWalkers) {
    const long long hq = h / a.group;
    const unsigned short* values = head_rows(a.v, a.v_stride, b, start, h) + col0;
    if (back) values = g.dy ? head_rows(g.dy, g.dy_stride, b, start, h) + col0 : nullptr;
    ChunkCopier<S, K, kBlockCols, kStages, kWide>{shared,
                                                  head_rows(a.k, a.k_stride, b, start, hq),
                                                  head_rows(a.q, a.q_stride, b, start, hq),
                                                  values,
                                                  space.prepared + entry,
                                                  a.k_stride[1],
                                                  a.q_stride[1],
                                                  back ? g.dy_stride[1] : a.v_stride[1],
                                                  stop - start,
                                                  a.H,
                                                  chunks,
                                                  cols,
                                                  warp - S::kWalkers,
                                                  lane,
                                                  back}
        .run();
    return;
  }

  const int group = warp / S::kParts, own0 = group * 16, value_tile = col0 / 16 + group;
  Walker<S> walker;
  walker.lane = lane;
  walker.part = warp % S::kParts;
  walker.barrier = 1 + group;
  walker.sums = reinterpret_cast<float4*>(shared + kStages * S::kStage) +
                group * S::kParts * (kChunk / 8 * 32);
  const void* const first = back ? g.dstate : a.initial_state;
  const long long* const stride = back ? g.dstate_stride : a.state_stride;
  const float* const at =
      static_cast<const float*>(first) + n * stride[0] + h * stride[1] + (col0 + own0) * stride[3];
  walker.each([&](float& s, int row, int col) {
    s = first && row < K && own0 + col < cols ? at[row * stride[2] + col * stride[3]] : 0.f;
  });
  const bool real = value_tile < S::kValueTiles;
  uint4* const states = (back ? space.late : space.states) + value_tile * S::kRowTiles * 32;
  for (int i = 0; i < chunks; i++) {
    __syncthreads();
    const int c = back ? chunks - 1 - i : i;
    const unsigned short* const k = shared + i % kStages * S::kStage;
    const unsigned short* const values = k + 2 * S::kKeys + own0;
    const uint4* const tables = reinterpret_cast<const uint4*>(k + S::kTables);
    const long long at_entry = entry + c * a.H;
    uint4* const saved = real ? states + at_entry * (S::kStateBlocks * 32) : nullptr;
    ChunkColumns x;
    if (back) {
      const ChunkWeights& weights = *reinterpret_cast<const ChunkWeights*>(tables);
      const uint4* const inverse = tables + sizeof(ChunkWeights) / 16;
      const uint4* const scores = inverse + 2 * kLowerBlocks * 32;
      const float scale = static_cast<float>(a.scale);
      const unsigned short* const q = k + S::kKeys;
      walker.back(x, saved, k, q, values, inverse, scores, weights, scale);
      const long long t = start + static_cast<long long>(c) * kChunk;
      const int tokens = static_cast<int>(min(stop - t, static_cast<long long>(kChunk)));
      if (real)
        walker.template put<V % 2 == 0>(dv + t * a.y_stride[1] + own0, a.y_stride[1], x, tokens,
                                        cols - own0);
    } else {
      const ChunkWeights& weights =
          *reinterpret_cast<const ChunkWeights*>(tables + 2 * kLowerBlocks * 32);
      walker.forward(x, saved, k, values, tables, weights);
      if (real)
        walker.template put<true>(space.misses + at_entry * (kChunk * S::kValues) + value_tile * 16,
                                  S::kValues, x, kChunk, 16);
    }
  }
  if (back && a.state) {
    float* const kept = static_cast<float*>(a.state) + nh * K * V + col0 + own0;
    walker.each([&](float& s, int row, int col) {
      if (row < K && own0 + col < cols) kept[static_cast<long long>(row) * V + col] = s;
    });
  }
}

// grid: slots * H. block: kTokenThreads.
template <int K, int V, bool kWide, bool kDirect>
__global__ void __launch_bounds__(kTokenThreads,
                                  (kWide && TokenShape<K, V>::kLean) ? kLeanBlocks : 2)
    delta_grad_tokens(const CallArgs a, const GradArgs g, const SpaceArgs space) {
  using S = TokenShape<K, V>;
  DYNAMIC_SHARED(unsigned short, shared);
  unsigned short *const q = shared, *const k = q + S::kKeys, *const dy = k + S::kKeys;
  unsigned short *const de = dy + S::kRows, *const e = de + S::kRows;
  uint4* const piece = reinterpret_cast<uint4*>(e + S::kMisses);
  Decay& decay = *reinterpret_cast<Decay*>(piece + S::kPiece);
  TokenSums& sums = *reinterpret_cast<TokenSums*>(&decay + 1);
  if (K % 16 != 0 || V % 16 != 0 || !g.dy)  // padding, and what no copy fills
    for (int i = threadIdx.x; i < S::kNumbers; i += kTokenThreads) shared[i] = 0;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  const unsigned item = blockIdx.x, heads = a.H, group = a.group;
  const SlotChunk chunk(a, item / heads);
  if (chunk.tokens == 0) return;
  const long long h = item % heads, b = chunk.b, hq = item % heads / group;
  const uint4* const states = space.states + static_cast<long long>(item) * (S::kStateBlocks * 32);
  const uint4* const late = space.late + static_cast<long long>(item) * (S::kStateBlocks * 32);
  const float scale = static_cast<float>(a.scale);
  TokenGradients<K, V, kDirect> own = {{warp, lane},
                                       a,
                                       g,
                                       chunk,
                                       h,
                                       q,
                                       k,
                                       e,
                                       dy,
                                       de,
                                       piece,
                                       decay,
                                       sums,
                                       scale,
                                       ((b * a.T + chunk.first) * a.H + h) * K,
                                       static_cast<int>(a.H * K)};
  // the whole states on their way to the cache, of which parts are fetched one after the other
#pragma unroll 1
  for (int i = threadIdx.x; i < S::kStateBlocks * 4; i += kTokenThreads) {
    prefetch(late + i * 8);
    prefetch(states + i * 8);
  }
  float gate[2], beta[2];
  if (warp == 7) load_gates(gate, beta, a, chunk, h, lane);
  __syncthreads();
  const int half = warp % 2 * kCopyRows, rows = chunk.tokens - half;
  const long long t = chunk.first + half;
  if (warp < 4) {
    const bool of_k = warp / 2;
    copy_rows<K, S::kKeyRow, kWide>(
        (of_k ? k : q) + half * S::kKeyRow,
        of_k ? head_rows(a.k, a.k_stride, b, t, hq) : head_rows(a.q, a.q_stride, b, t, hq),
        of_k ? a.k_stride[1] : a.q_stride[1], rows, K, lane);
  } else if (warp < 6 || g.dy) {
    const bool of_y = warp / 2 == 3;
    copy_rows<V, S::kValueRow, kWide>(
        (of_y ? dy : de) + half * S::kValueRow,
        of_y ? head_rows(g.dy, g.dy_stride, b, t, h) : head_rows(a.y, a.y_stride, b, t, h),
        of_y ? g.dy_stride[1] : a.y_stride[1], rows, V, lane);
  }
  copy_misses<S>(e, space.misses + static_cast<long long>(item) * (kChunk * S::kValues));
  own.fetch(late, 0);
  if (warp == 7) {
    *reinterpret_cast<float2*>(sums.beta + 2 * lane) = {beta[0], beta[1]};
    decay.fill(lane, gate[0], gate[1], 1, 1);
    __syncwarp();
    decay.fill_diagonal(lane);
  }
#pragma unroll 1
  for (int p = 0; p < S::kPieces; p++) {
    cp_async_wait<0>();
    __syncthreads();
    own.read_late(p);
    __syncthreads();
    const bool more = p + 1 < S::kPieces;
    own.fetch(more ? late : states, more ? p + 1 : 0);
  }
  own.put_inner(sums.last, own.last);
  {
    Pairs<S> pairs = {{warp, lane}, q, k, dy, de, e, decay, sums, scale};
    pairs.pair_up();
    __syncthreads();
    pairs.put_products();
    put_betas<kDirect>(a, g, chunk, h, decay, sums);
    if (warp == 2 * kBlocks - 1)
      put_written(sums, decay, lane);  // one of two that have the fewest pairs
    __syncthreads();
    pairs.put_gate_columns();
    __syncthreads();
    pairs.put_weights();
  }
#pragma unroll 1
  for (int p = 0; p < S::kPieces; p++) {
    cp_async_wait<0>();
    __syncthreads();
    own.read_state(p, late);
    if (p + 1 == S::kPieces) break;
    __syncthreads();
    own.fetch(states, p + 1);
  }
  own.put_inner(sums.edge, own.edge);
  own.put_corner();
  __syncthreads();
  if (warp == 0) put_gates<kDirect>(a, g, chunk, h, decay, sums, lane);
}
