#include <cstdio>
#include <flashinfer/cuda/attention/backward/sm90/launch.cuh>
using namespace flashinfer;
using namespace flashinfer::cuda;
// tensors [tokens, heads, dim] contiguous, one request
extern "C" int64_t bw_run(void* q, void* k, void* v, void* out, void* grad, float* lse, float* grad_lse, void* dq, void* dk, void* dv,
  float* memory, int tokens, int kv_tokens, int hq, int hk, int dim, int causal, float scale, int bf16, void* stream, int heads) {
  try {
  PrefillBackwardParams p{};
  auto R=[&](void* d,int h){return HeadRows{d,(int64_t)h*dim,dim};};
  p.q=R(q,hq);p.k=R(k,hk);p.v=R(v,hk);p.out=R(out,hq);p.grad=R(grad,hq);p.dq=R(dq,hq);p.dk=R(dk,hk);p.dv=R(dv,hk);
  p.lse=lse;p.grad_lse=grad_lse;p.batch_size=1;p.tokens=tokens;p.kv_tokens=kv_tokens;p.num_qo_heads=hq;p.num_kv_heads=hk;
  p.head_dim_qk=p.head_dim_vo=dim;p.mask_mode=causal?MaskMode::kCausal:MaskMode::kNone;p.window_left=-1;p.sm_scale=scale;
  p.dtype=bf16?DType::kBFloat16:DType::kFloat16;
  Launch w{stream,0,0};
  int64_t bytes = bf16? sm90::plan_hopper<bfloat16_t>(p,w): sm90::plan_hopper<half_t>(p,w);
  if(!memory) return bytes;
  p.memory=memory;
  bool ok = bf16? sm90::launch_hopper<bfloat16_t>(p,w): sm90::launch_hopper<half_t>(p,w);
  return ok?p.splits:-2;
  } catch (const std::exception& e) { fprintf(stderr,"%s\n",e.what()); return -9; }
}
