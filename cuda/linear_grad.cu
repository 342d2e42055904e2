// Gradients of the linear rule in chunks of 64 tokens on tensor cores, for bfloat16, float16 and
// float32.
//
// chunk_states walks through the chunks of a sequence, forward for the state S before each, and
// back for E, the gradient of the state after each:
//
//   S <- whole S + sum_j to_j beta_j k_j v_j^T         E <- whole E + scale sum_i from_i q_i dy_i^T
//
// with whole the product of the chunk's gates, from_t that up to t and to_t that after t.
// chunk_grads then makes the gradients of all chunks at once (grad_rows.cuh). That of a gate is the
// inner product of what comes before it with what comes after it, neither of which the gate is in:
//
//   d gate_t = <dS_t, S_{t-1}>       dS_t = to_t E + scale sum_{i >= t} G_it q_i dy_i^T
//                                 S_{t-1} = from_{t-1} S + sum_{j < t} G_{t-1,j} beta_j k_j v_j^T
//
// G_ij is the product of the gates after j up to i. With A_ij = scale beta_j (q_i . k_j)(dy_i .
// v_j) the sums over i and j are products of A with G on both sides, and three sums like it with S
// and E.
#include "grad_rows.cuh"
#include "grad_states.cuh"

// Zeros for tokens of no sequence, of one head.
template <class In, int K, int V, int kThreads, bool kPartial>
__device__ __forceinline__ void clear_rest(const CallArgs& a, const GradArgs& g, long long h) {
  const long long first = sequence(a, 0).start, last = sequence(a, a.N - 1).stop;
  for (long long t = 0; t < a.T; t++) {
    if (t >= first && t < last) {
      t = last - 1;
      continue;
    }
    const long long at = t * a.H + h;
    for (int i = threadIdx.x; i < K && !kPartial; i += kThreads) {
      static_cast<In*>(g.dq)[at * K + i] = Narrow<In>::from(0.f);
      static_cast<In*>(g.dk)[at * K + i] = Narrow<In>::from(0.f);
    }
    for (int i = threadIdx.x; i < V; i += kThreads)
      static_cast<In*>(a.y)[t * a.y_stride[1] + h * a.y_stride[2] + i] = Narrow<In>::from(0.f);
    if (threadIdx.x == 0 && !kPartial) {
      put_scalar<In>(g.dgate, at, 0.f, a.gate_kind);
      put_scalar<In>(g.dbeta, at, 0.f, a.beta_kind);
    }
  }
}

// Numbers of one chunk of one head into shared memory.
template <class In, class S, bool kWide>
struct Copies {
  using F = typename S::F;
  using State = typename Kept<In>::Type;
  const CallArgs& a;
  const GradArgs& g;
  const GradShared<S>& shared;
  long long b, t0, h, hq, chunk;
  int count;

  __device__ __forceinline__ const In* row(const void* from, const long long* stride,
                                           long long head) const {
    return static_cast<const In*>(from) + b * stride[0] + t0 * stride[1] + head * stride[2];
  }
  __device__ __forceinline__ const State* state_at(long long at) const {
    return static_cast<const State*>(g.states) + (at * a.H + h) * (S::kRealKeys * S::kRealValues);
  }
  // All but S, and S too where there is room for it. Returns this thread's share of the inner
  // product of S and E if they pass through registers.
  __device__ __forceinline__ float all() const {
    const void* const dy = g.dy ? g.dy : a.v;
    const long long* const stride = g.dy ? g.dy_stride : a.v_stride;
    const int rows = g.dy ? count : 0;
    const State* const state = state_at(chunk);
    const State* const dstate = state_at(count_chunks(a) + chunk);
    if constexpr (F::kCount == 1) {
      keys(shared.k(), row(a.k, a.k_stride, hq), a.k_stride[1]);
      keys(shared.q(), row(a.q, a.q_stride, hq), a.q_stride[1]);
      values(shared.v(), row(a.v, a.v_stride, h), a.v_stride[1], count);
      values(shared.dy(), row(dy, stride, h), stride[1], rows);
      states(shared.dstate(), dstate);
      if (S::kApart) states(shared.state(), state);
      return 0;
    } else {  // all on their way at once
      HeldRows<In, kChunk, S::kKeys, S::kThreads, kWide> q, k;
      HeldRows<In, kChunk, S::kValues, S::kThreads, kWide> v, d;
      HeldRows<State, S::kKeys, S::kValues, S::kThreads, kWide> before, after;
      k.load(row(a.k, a.k_stride, hq), a.k_stride[1], count, S::kRealKeys);
      q.load(row(a.q, a.q_stride, hq), a.q_stride[1], count, S::kRealKeys);
      v.load(row(a.v, a.v_stride, h), a.v_stride[1], count, S::kRealValues);
      d.load(row(dy, stride, h), stride[1], rows, S::kRealValues);
      after.load(dstate, S::kRealValues, S::kRealKeys, S::kRealValues);
      if (S::kApart) before.load(state, S::kRealValues, S::kRealKeys, S::kRealValues);
      k.template store<F, S::kKeyRow, kGiven>(shared.k(), nullptr);
      q.template store<F, S::kKeyRow, kGiven>(shared.q(), nullptr);
      v.template store<F, S::kValueRow, kGiven>(shared.v(), nullptr);
      d.template store<F, S::kValueRow, kGiven>(shared.dy(), nullptr);
      after.template store<F, S::kValueRow, kStates>(shared.dstate(), nullptr);
      if (!S::kApart) return 0;
      before.template store<F, S::kValueRow, kStates>(shared.state(), nullptr);
      return share_of_inner(before, after);
    }
  }
  __device__ __forceinline__ void states(typename S::Number* to, const State* from) const {
    copy_rows<F, State, S::kKeys, S::kValues, S::kValueRow, S::kThreads, kWide, kStates>(
        to, from, S::kRealValues, S::kRealKeys, S::kRealValues);
  }

 private:
  __device__ __forceinline__ void keys(typename S::Number* to, const In* from,
                                       long long stride) const {
    copy_rows<F, In, kChunk, S::kKeys, S::kKeyRow, S::kThreads, kWide>(to, from, stride, count,
                                                                       S::kRealKeys);
  }
  __device__ __forceinline__ void values(typename S::Number* to, const In* from, long long stride,
                                         int rows) const {
    copy_rows<F, In, kChunk, S::kValues, S::kValueRow, S::kThreads, kWide>(to, from, stride, rows,
                                                                           S::kRealValues);
  }
};

// grid: chunks * H blocks, and H more for packed sequences. block: GradShape::kThreads. kPartial:
// heads share q and k, and finish_grad is to add up their gradients.
template <class In, int K, int V, int kParts, int kRoles, bool kApart, bool kWide, bool kPartial,
          int kTogether>
__global__ void __launch_bounds__(GradShape<In, K, V, kParts, kRoles, kApart>::kThreads, kTogether)
    chunk_grads(const CallArgs a, const GradArgs g) {
  using S = GradShape<In, K, V, kParts, kRoles, kApart>;
  using F = typename S::F;
  using Out = typename Choose<kPartial, float, In>::Type;
  DYNAMIC_SHARED(typename F::Number, rows);
  const GradShared<S> shared{rows};
  typename S::Scalars& s = shared.scalars();
  const int warp = this_warp(), lane = threadIdx.x % 32;
  const unsigned heads = a.H, group = a.group;  // short numbers are quick to divide
  const long long chunk = blockIdx.x / heads, h = blockIdx.x % heads;
  const long long hq = static_cast<unsigned>(h) / group;
  const long long chunks = count_chunks(a);
  if (chunk >= chunks) {
    clear_rest<In, K, V, S::kThreads, kPartial>(a, g, h);
    return;
  }
  const long long n = find_sequence(a, chunk);
  const Sequence seq = sequence(a, n);
  const long long t0 = seq.start + (chunk - first_chunk(a, n, seq.start)) * kChunk;
  if (t0 < seq.start || t0 >= seq.stop) return;
  const int count = static_cast<int>(min(seq.stop - t0, static_cast<long long>(kChunk)));
  const int b = static_cast<int>(seq.b);

  const int w = warp % kBlocks, part = warp / kBlocks % kParts;
  const bool of_keys = warp < kBlocks * kParts, of_queries = kRoles == 1 || !of_keys;
  Scalar<In> gate, beta;
  const int t = w * kBlock + lane % kBlock;
  const bool real = t < count;
  if (real && warp < kBlocks) {
    gate.load(a.gate, b * a.gate_stride[0] + (t0 + t) * a.gate_stride[1] + h * a.gate_stride[2],
              a.gate_kind);
    beta.load(a.beta, b * a.beta_stride[0] + (t0 + t) * a.beta_stride[1] + h * a.beta_stride[2],
              a.beta_kind);
  }
  const Copies<In, S, kWide> copies{a, g, shared, b, t0, h, hq, chunk, count};
  float share = copies.all();
  cp_async_commit();
  if (threadIdx.x == 0) {
    s.row = (static_cast<long long>(b) * a.T + t0) * a.H + h;
    s.dv = b * a.y_stride[0] + t0 * a.y_stride[1] + h * a.y_stride[2];
  }
  if (warp < kBlocks) {
    const double x = real ? gate.template value<double>(a.gate_kind) : 1.0;
    const float y = real ? beta.template value<float>(a.beta_kind) : 0.f;
    s.fill(w, static_cast<float>(nan_if_infinite(x)), nan_if_infinite(y), lane);
  }
  cp_async_wait<0>();
  __syncthreads();

  if (F::kCount == 1 || !kApart) share = share_of_inner(shared, copies.state_at(chunk));
  const float inner = sum_of_warp(share);
  if (lane == 0) s.inner[warp] = inner;

  const float scale = static_cast<float>(a.scale);
  const int key0 = part * S::kKeyTiles * 8, value0 = part * S::kValueTiles * 8;
  const int row0 = w * kBlock;
  const long long step = a.H * K;
  if (of_keys) {
    float dk[S::kKeyTiles][4] = {}, dv[S::kValueTiles][4] = {};
    make_keys(shared, scale, w, part, lane, dk, dv);
    put_rows<Out, kWide>(static_cast<Out*>(kPartial ? g.partial_dk : g.dk) + s.row * K, step, dk,
                         row0, count, key0, K, lane);
    put_rows<In, kWide>(static_cast<In*>(a.y) + s.dv, a.y_stride[1], dv, row0, count, value0, V,
                        lane);
  }
  if (!kApart) {
    __syncthreads();
    copies.states(shared.state(), copies.state_at(chunk));
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
  }
  if (of_queries) {
    float dq[S::kKeyTiles][4] = {};
    make_queries(shared, scale, w, part, lane, dq);
    put_rows<Out, kWide>(static_cast<Out*>(kPartial ? g.partial_dq : g.dq) + s.row * K, step, dq,
                         row0, count, key0, K, lane);
  }
  __syncthreads();
  if (warp >= kBlocks) return;
  const float dgate = sum_gates(s, scale, w, lane);
  if (lane >= kBlock || !real) return;
  float dbeta = 0;
#pragma unroll
  for (int i = 0; i < kParts; i++) dbeta += s.dbeta[i][t];
  const long long token = s.row + t * a.H;
  if (kPartial) {
    float* const pair = static_cast<float*>(g.partial_scalars) + 2 * token;
    pair[0] = dgate;
    pair[1] = dbeta;
  } else {
    const bool log = a.gate_kind == kLogOfInputs || a.gate_kind == kLogOfFloat;
    put_scalar<In>(g.dgate, token, log ? exact_product(s.gate[t], dgate) : dgate, a.gate_kind);
    put_scalar<In>(g.dbeta, token, dbeta, a.beta_kind);
  }
}
