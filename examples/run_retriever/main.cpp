// Runs a package of lik_ops.export.package: libtorch, no Python, no lik_ops.
//
//     run_retriever retriever.pt2 inputs.pt outputs.pt
//
// inputs.pt is what torch.save made of a tuple of calls, each a tuple of tensors on the device that the package is for;
// torch.load reads outputs.pt as a tuple of results, each a tuple of tensors. examples/export_retriever.py --cpp builds
// and runs it.

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/serialize.h>

namespace {

std::vector<char> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("cannot read " + path);
  }
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write_file(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) {
    throw std::runtime_error("cannot write " + path);
  }
}

std::vector<std::vector<at::Tensor>> read_calls(const std::string& path) {
  const c10::IValue saved = torch::pickle_load(read_file(path));
  std::vector<std::vector<at::Tensor>> calls;
  for (const c10::IValue& call : saved.toTupleRef().elements()) {
    auto& tensors = calls.emplace_back();
    for (const c10::IValue& tensor : call.toTupleRef().elements()) {
      tensors.push_back(tensor.toTensor());
    }
  }
  return calls;
}

void write_results(const std::string& path, const std::vector<std::vector<at::Tensor>>& results) {
  // Tuples: a pickled C++ list names its type, which torch.load refuses by default.
  std::vector<c10::IValue> saved;
  for (const auto& tensors : results) {
    saved.push_back(c10::ivalue::Tuple::create(std::vector<c10::IValue>(tensors.begin(), tensors.end())));
  }
  write_file(path, torch::pickle_save(c10::ivalue::Tuple::create(std::move(saved))));
}

void run(const std::string& package, const std::string& inputs, const std::string& outputs) {
  const c10::InferenceMode inference;
  const auto calls = read_calls(inputs);
  if (calls.empty() || calls.front().empty()) {
    throw std::runtime_error(inputs + " holds no tensors");
  }
  const c10::DeviceIndex device = calls.front().front().device().index();  // -1 on a CPU
  torch::inductor::AOTIModelPackageLoader retriever(
      package, "model", /*run_single_threaded=*/false, /*num_runners=*/1, device);

  std::vector<std::vector<at::Tensor>> results;
  for (const auto& call : calls) {
    results.push_back(retriever.run(call));
    std::cout << "scores " << results.back().at(0).sizes() << " on " << results.back().at(0).device() << '\n';
  }
  write_results(outputs, results);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: run_retriever package.pt2 inputs.pt outputs.pt\n";
    return 2;
  }
  try {
    run(argv[1], argv[2], argv[3]);
  } catch (const std::exception& error) {
    std::cerr << "run_retriever: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
