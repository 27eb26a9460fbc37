// Maps the served tables of a directory of serving.build, by the index of its current generation
// (torchrec_dyn/serving/generation.py). No row is copied: pages are read at first use, and processes share them.
#pragma once

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

struct ServedTables {
  std::string generation;
  std::map<std::string, at::Tensor> tensors;
};

inline std::string current_generation(const std::string& folder) {
  std::string name;
  TORCH_CHECK(std::ifstream(folder + "/current") >> name, folder, ": expected a directory of serving.build.");
  return name;
}

// A whole file, [bytes] uint8. It is unmapped when the last tensor that reads it is gone.
inline at::Tensor mapped_file(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY);
  struct stat found{};
  TORCH_CHECK(file >= 0 && fstat(file, &found) == 0, path, ": expected a file, got none.");
  const auto size = static_cast<size_t>(found.st_size);
  void* memory = size ? mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0) : nullptr;
  close(file);
  TORCH_CHECK(memory != MAP_FAILED, path, ": expected a file that can be mapped.");
  return at::from_blob(memory, {found.st_size}, [size](void* mapped) { munmap(mapped, size); }, at::kByte);
}

// Throws c10::Error if a file is missing.
inline ServedTables map_generation(const std::string& folder, const std::string& generation) {
  static const std::map<std::string, at::ScalarType> dtypes = {
      {"int64", at::kLong}, {"float32", at::kFloat}, {"float16", at::kHalf}, {"uint8", at::kByte}};
  std::map<std::string, at::Tensor> files, tensors;
  std::ifstream index(folder + "/" + generation + "/tensors");
  TORCH_CHECK(index, folder, ": expected an index in generation ", generation, ", got none.");
  std::string name, dtype, file, line;
  for (int64_t begin = 0, size = 0; std::getline(index, line);) {
    std::istringstream words(line);
    words >> name >> dtype >> file >> begin;
    std::vector<int64_t> shape;
    while (words >> size) shape.push_back(size);
    if (!files.count(file)) files[file] = mapped_file(folder + "/" + file);
    const int64_t bytes = c10::multiply_integers(shape) * static_cast<int64_t>(elementSize(dtypes.at(dtype)));
    tensors[name] = files[file].narrow(0, begin, bytes).view(dtypes.at(dtype)).view(shape);
  }
  return {generation, tensors};
}

// Returns the current generation. If a generation is removed before its files are mapped: then the next one.
inline ServedTables map_current(const std::string& folder) {
  for (std::string name = current_generation(folder);;) {
    try {
      return map_generation(folder, name);
    } catch (const c10::Error&) {
      if (current_generation(folder) == name) throw;
      name = current_generation(folder);
    }
  }
}
