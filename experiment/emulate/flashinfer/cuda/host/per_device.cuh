#pragma once
namespace flashinfer::cuda { template <typename T> struct PerDevice { T v; template <typename F> const T& get(int d, const F& f) { return v = f(d); } }; }
