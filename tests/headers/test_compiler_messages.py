"""What a compiler says of programs that include the public headers."""
import importlib.util
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TORCH = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0]) / "include"


def compiler_says(program):
    """The output of the compiler, which only checks the program."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "program.cpp")
        source.write_text(program)
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-fsyntax-only", "-I", ROOT / "include",
                   "-isystem", TORCH, "-isystem", TORCH / "torch/csrc/api/include", source]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    return done.stderr


WRONG_CALLS = """
#include <memory>
#include "tessera/nn/containers.h"
#include "tessera/nn/linear.h"
using namespace tessera;
struct NoForward : nn::Module<NoForward> {};
struct TwoArguments : nn::Module<TwoArguments> {
  at::Tensor forward(const at::Tensor& x, int n) { return x * n; }
};
void call(const at::Tensor& x) {
  NoForward without;
  const at::Tensor y = without(x);
  nn::Sequential steps(std::make_shared<NoForward>());
  TwoArguments two;
  two(x);
  two(x, "three");
  nn::Linear linear(3, 4);
  linear(x, x);
}
"""

# The two lines of the README, beside all of ATen and what a program prints.
EVERY_NAME = """
#include <ATen/ATen.h>
#include <iostream>
#include <string>
#include "tessera/tessera.hpp"
using namespace tessera;
using namespace tensor_parallel;
void use(const at::Tensor& x, const DeviceMesh& mesh, nn::ModuleBase& module) {
  if (is_distributed(x)) {
    std::cout << DistributedTensor(x).placements() << DistributedTensor(x).layout() << sharding_spec(x)
              << mesh << mesh.shape() << Placement(Shard{0}) << ReduceOp::kSum << fsdp::Options{};
  }
  parallelize_module(module, mesh["tp"], {{"up", colwise_parallel()}});
  cross_entropy(x, x);
  distribute_tensor(x, mesh, {Shard{0}});
  zeros({2, 3}, mesh, {Replicate{}});
  rand({2, 3}, RandomKey{1, 2}, mesh, {Replicate{}});
  local_tensor(x);
  visualize(DistributedTensor(x));
}
"""


def public_types():
    """Types of the two namespaces that are no templates."""
    found = set()
    for path in sorted((ROOT / "include/tessera").rglob("*.h")):
        if "detail" in path.parts:
            continue
        for space, body in re.findall(r"(?ms)^namespace (tessera(?:::tensor_parallel)?) \{$(.*?)^\}  // namespace \1$",
                                      path.read_text()):
            body = re.sub(r"(?ms)^namespace [\w:]+ \{$.*?^\}  // namespace", "", body)
            body = re.sub(r"(?m)^template\b.*\n.*$", "", body)
            found |= set(re.findall(r"(?m)^(?:class|struct|enum class|using) (\w+)\b(?!;| \[\[deprecated)", body))
    return found


class CompilerMessages(unittest.TestCase):
    def test_a_wrong_call_of_a_module_is_one_readable_line(self):
        said = compiler_says(WRONG_CALLS)
        errors = [line for line in said.splitlines() if " error: " in line]
        needs_forward = [line for line in errors if "a module that is called needs a public forward" in line]
        takes_others = [line for line in errors if "this module's forward does not take these arguments" in line]
        self.assertEqual((len(needs_forward), len(takes_others), len(errors)), (1, 3, 4), said)
        self.assertLess(len(said.splitlines()), 12 * len(errors), said)

    def test_no_name_is_ambiguous_beside_the_readmes_two_lines(self):
        types = public_types()
        self.assertTrue({"DeviceMesh", "Shard", "RedistributionPlan", "ParallelizePlan", "StylePtr", "Layout"} <= types, types)
        aliases = "".join(f"using Alias{i} = {name};\n" for i, name in enumerate(sorted(types)))
        said = compiler_says(EVERY_NAME + aliases)
        self.assertFalse(said, said)


if __name__ == "__main__":
    unittest.main()
