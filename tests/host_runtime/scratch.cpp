// scratch.cuh for a test: see tests/test_cuda_scratch.py.
#include "scratch.cuh"

extern "C" {

void set_stream(int32_t handle, uint64_t id, uint64_t capture) {
  host_runtime::streams[handle] = {id, capture};
}
void fail_allocation(int32_t after) { host_runtime::failing_allocation = host_runtime::allocations + after; }
int32_t bad_questions() { return host_runtime::bad_questions; }

const char* get(int32_t device, uint64_t handle, uint64_t bytes, uint64_t counters, void** out) {
  evenkv::Scratch scratch;
  const char* error =
      evenkv::get_scratch(device, reinterpret_cast<cudaStream_t>(handle), bytes, counters, scratch);
  out[0] = scratch.partials;
  out[1] = scratch.counters;
  return error;
}

const char* fill(int32_t byte) { return evenkv::fill_scratch(byte); }

}  // extern "C"
