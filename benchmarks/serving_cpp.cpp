// Measures requests of a program of serving.compile_program without Python, for bench_serving_cpp.py.
//
//     serving_cpp PROGRAM.pt2 SERVED LIBRARY...
//
// Each line of the input is a file of several requests, one list of tensors each, and a number of calls. Each line of
// the output is the CPU time of this thread for these calls, in seconds.
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <time.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <iostream>
#include <iterator>

#include "../examples/serve_cpp/served_tables.h"

namespace {

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace

int main(int argc, char** argv) {
  TORCH_CHECK(argc > 3, "usage: serving_cpp PROGRAM.pt2 SERVED LIBRARY...");
  for (int i = 3; i < argc; ++i) TORCH_CHECK(dlopen(argv[i], RTLD_LAZY | RTLD_GLOBAL), dlerror());
  at::set_num_threads(1);
  const c10::InferenceMode no_gradients;
  torch::inductor::AOTIModelPackageLoader program(argv[1], "model", true);
  const ServedTables served = map_current(argv[2]);
  std::vector<at::Tensor> tables;
  std::istringstream words(program.get_metadata().at("tables"));
  for (std::string name; words >> name;) tables.push_back(served.tensors.at(name));
  std::map<std::string, std::vector<std::vector<at::Tensor>>> files;
  size_t next = 0, calls = 0;
  for (std::string path; std::cin >> path >> calls;) {
    if (!files.count(path)) {
      std::ifstream file(path, std::ios::binary);
      const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
      const c10::IValue saved = torch::jit::pickle_load(bytes);
      for (const c10::IValue& request : saved.toListRef()) {
        std::vector<at::Tensor>& inputs = files[path].emplace_back();
        for (const c10::IValue& input : request.toListRef()) inputs.push_back(input.toTensor());
      }
    }
    const auto& requests = files[path];
    const double begin = thread_seconds();
    for (size_t call = 0; call < calls; ++call) {
      std::vector<at::Tensor> inputs = requests[next++ % requests.size()];
      inputs.insert(inputs.end(), tables.begin(), tables.end());
      program.boxed_run(std::move(inputs));
    }
    std::cout << thread_seconds() - begin << std::endl;
  }
}
