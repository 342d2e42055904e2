// The linear rule as a first CUDA kernel often has it: one thread for each column of the state.
// recurrence.py times it beside the library. Launch with B * H blocks of D threads.
//
//     S_t = gate_t * S_{t-1} + beta_t * k_t v_t^T;   y_t = q_t S_t
//
// HEAD_DIM (D) comes from the compiler's command line.

extern "C" __global__ void user_recurrence(const float* q,  // (B, T, H, D), like k, v and y
                                           const float* k, const float* v,
                                           const float* gate,  // (B, T, H), like beta
                                           const float* beta, float* y, int T, int H) {
  const long long b = blockIdx.x / H, h = blockIdx.x % H;
  const int j = threadIdx.x;

  __shared__ float k_t[HEAD_DIM], q_t[HEAD_DIM];
  float S[HEAD_DIM];  // column j of the state
#pragma unroll
  for (int i = 0; i < HEAD_DIM; ++i) S[i] = 0.0f;

  for (long long t = 0; t < T; ++t) {
    const long long token = (b * T + t) * H + h;
    k_t[j] = k[token * HEAD_DIM + j];
    q_t[j] = q[token * HEAD_DIM + j];
    __syncthreads();

    const float gate_t = gate[token], beta_t = beta[token], v_j = v[token * HEAD_DIM + j];
    float y_j = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM; ++i) {
      S[i] = gate_t * S[i] + beta_t * k_t[i] * v_j;
      y_j += q_t[i] * S[i];
    }
    y[token * HEAD_DIM + j] = y_j;

    // Without this barrier a fast warp overwrites k_t and q_t while a slow one still reads
    // them. With D <= 32 the block is one warp and the mistake shows only on some devices.
    __syncthreads();
  }
}
