// Serves a program of serving.compile_program without Python, from the mapped files of a directory that deltas change.
//
//     serve PROGRAM.pt2 SERVED LIBRARY...
//
// LIBRARY is torchrec_dyn/_C.abi3.so, and for rows of int8 also fbgemm_gpu/fbgemm_gpu_tbe_inference.so. Each line of
// the input has two paths: of the input tensors, a list saved by torch.save, and of the outputs, a tuple for torch.load.
// Each answer is a line with the generation that it is from.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <iostream>
#include <iterator>

#include "served_tables.h"

int main(int argc, char** argv) {
  TORCH_CHECK(argc > 3, "usage: serve PROGRAM.pt2 SERVED LIBRARY...");
  for (int i = 3; i < argc; ++i) TORCH_CHECK(dlopen(argv[i], RTLD_LAZY | RTLD_GLOBAL), dlerror());
  const c10::InferenceMode no_gradients;
  setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 0);  // a directory with other tables is an error
  torch::inductor::AOTIModelPackageLoader program(argv[1]);
  const std::string folder = argv[2], names = program.get_metadata().at("tables");
  ServedTables served = map_current(folder);
  for (std::string request, answer; std::cin >> request >> answer;) {
    if (current_generation(folder) != served.generation) served = map_current(folder);
    std::ifstream file(request, std::ios::binary);
    const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
    std::vector<at::Tensor> inputs;
    const c10::IValue saved = torch::jit::pickle_load(bytes);
    for (const c10::IValue& input : saved.toListRef()) inputs.push_back(input.toTensor());
    std::istringstream words(names);
    for (std::string name; words >> name;) inputs.push_back(served.tensors.at(name));
    const auto outputs = program.run(inputs);
    const std::vector<c10::IValue> values(outputs.begin(), outputs.end());
    const std::vector<char> made = torch::jit::pickle_save(c10::ivalue::Tuple::create(values));
    std::ofstream(answer, std::ios::binary).write(made.data(), static_cast<std::streamsize>(made.size()));
    std::cout << served.generation << std::endl;
  }
}
