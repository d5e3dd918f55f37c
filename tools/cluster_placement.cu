// Where the hardware puts clusters: how many SMs hold how many blocks of one launch, while all of them run.
//
//   nvcc -std=c++17 -arch=sm_90a -o /tmp/placement tools/cluster_placement.cu && /tmp/placement
//
// For clusters of 1 to 8 blocks of 128 threads, with the shared memory of evenkv_cuda's blocks (three fit an
// SM) and with so much that two or one fit.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  fprintf(stderr, "cluster_placement: %s: %s\n", what, cudaGetErrorString(status));
  exit(2);
}

// Notes the SM, then stays for a while, so that all blocks of a launch that fits are there at once.
__global__ void note_sm(int* sms) {
  int sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  if (threadIdx.x == 0) sms[blockIdx.y * gridDim.x + blockIdx.x] = sm;
  const long long begin = clock64();
  while (clock64() - begin < 200000) {
  }
}

// "2x3 6x2": 2 SMs with 3 blocks, 6 SMs with 2.
void show(int splits, int clusters, int shared_bytes) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(splits, clusters);
  config.blockDim = dim3(128);
  config.dynamicSmemBytes = shared_bytes;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  int at_once = 0;
  check(cudaOccupancyMaxActiveClusters(&at_once, note_sm, &config), "counting clusters");
  std::vector<int> sms(splits * clusters);
  int* device = nullptr;
  check(cudaMalloc(&device, sms.size() * sizeof(int)), "allocating");
  check(cudaLaunchKernelEx(&config, note_sm, device), "launching");
  check(cudaMemcpy(sms.data(), device, sms.size() * sizeof(int), cudaMemcpyDeviceToHost), "copying");
  check(cudaFree(device), "freeing");
  std::map<int, int> blocks_on, sms_with;
  for (const int sm : sms) ++blocks_on[sm];
  for (const auto& [sm, blocks] : blocks_on) ++sms_with[blocks];
  int apart = 0;  // clusters whose blocks are on as many SMs
  for (int c = 0; c < clusters; ++c) {
    std::map<int, int> own;
    for (int b = 0; b < splits; ++b) ++own[sms[c * splits + b]];
    apart += static_cast<int>(own.size()) == splits;
  }
  printf("%d clusters of %d, %3d KB a block, %3d at once: %3zu SMs;", clusters, splits, shared_bytes / 1024,
         at_once, blocks_on.size());
  for (const auto& [blocks, count] : sms_with) printf(" %dx%d", count, blocks);
  printf("; %d clusters on %d SMs each\n", apart, splits);
}

}  // namespace

int main() {
  constexpr int kThree = 67 * 1024, kTwo = 77 * 1024, kOne = 115 * 1024;
  check(cudaFuncSetAttribute(note_sm, cudaFuncAttributeMaxDynamicSharedMemorySize, kOne),
        "asking for memory");
  for (int splits = 1; splits <= 8; ++splits) {
    for (const int blocks : {64, 128, 256}) {
      for (const int shared_bytes : {kThree, kTwo, kOne}) {
        if (blocks > 132 && shared_bytes == kOne) continue;
        show(splits, blocks / splits, shared_bytes);
      }
    }
  }
  return 0;
}
