// A stream beside that of a handler, on which one of the handler's ops runs while the others run.
#pragma once

#include <cuda_runtime_api.h>

namespace jax_ep {

// Belongs to one device. Where kernels of both streams wait for SMs, those of this one come first.
class SideStream {
 public:
  SideStream() = default;
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  ~SideStream();

  // Creates the stream, on the current device. May be called again after a failure.
  cudaError_t Open();
  bool is_open() const { return joined_ != nullptr; }
  // Makes this stream wait for all that is on `main`. Then work may be launched on `stream()`, and Join
  // called, which makes `main` wait for it. If `main` is being recorded in a CUDA graph, so is this stream.
  cudaError_t Fork(cudaStream_t main);
  cudaError_t Join(cudaStream_t main);
  // Makes `main` wait until `starting()`, which must have been recorded on this stream since Fork.
  cudaError_t AwaitStart(cudaStream_t main);
  cudaStream_t stream() const { return stream_; }
  cudaEvent_t starting() const { return starting_; }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t forked_ = nullptr, starting_ = nullptr, joined_ = nullptr;
};

}  // namespace jax_ep
