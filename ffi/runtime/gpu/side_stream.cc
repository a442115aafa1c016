#include "runtime/gpu/side_stream.h"

#include <initializer_list>

namespace jax_ep {

// A call site may outlive the driver's context, at the end of the process. Then these calls only fail.
SideStream::~SideStream() {
  for (cudaEvent_t event : {forked_, starting_, joined_}) {
    if (event != nullptr) (void)cudaEventDestroy(event);
  }
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  (void)cudaGetLastError();
}

cudaError_t SideStream::Open() {
  int least = 0, greatest = 0;
  cudaError_t error = cudaSuccess;
  if (stream_ == nullptr) {
    error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (error == cudaSuccess) error = cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest);
  }
  for (cudaEvent_t* event : {&forked_, &starting_, &joined_}) {
    if (error != cudaSuccess || *event != nullptr) continue;
    error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
  }
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

static cudaError_t Await(cudaStream_t stream, cudaEvent_t event) {
  const cudaError_t error = cudaStreamWaitEvent(stream, event, 0);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

static cudaError_t Order(cudaStream_t first, cudaEvent_t event, cudaStream_t second) {
  const cudaError_t error = cudaEventRecord(event, first);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaSuccess ? Await(second, event) : error;
}

cudaError_t SideStream::Fork(cudaStream_t main) { return Order(main, forked_, stream_); }

cudaError_t SideStream::Join(cudaStream_t main) { return Order(stream_, joined_, main); }

cudaError_t SideStream::AwaitStart(cudaStream_t main) { return Await(main, starting_); }

}  // namespace jax_ep
