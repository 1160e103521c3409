"""Which versions of libtorch are taken: CMake and scripts/setup refuse others, the README names them."""
import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(user LANGUAGES NONE)
include({root}/cmake/TesseraTorch.cmake)
message(STATUS "took ${{TESSERA_TORCH_VERSION}}")
"""


def known_versions():
    text = (ROOT / "cmake/TesseraTorch.cmake").read_text()
    return re.search(r"(?m)^set\(TESSERA_TESTED_TORCH (.*)\)$", text)[1].split()


def make_libtorch(folder, minor):
    """Makes the files of libtorch 2.MINOR that CMake looks at."""
    for name, text in {"include/torch/csrc/api/include/torch/torch.h": "",
                       "include/torch/headeronly/version.h":
                           f"#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR {minor}\n",
                       "share/cmake/Torch/TorchConfig.cmake": ""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def configure(minor, *options):
    """What CMake says, without its line breaks."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        make_libtorch(folder / "libtorch", minor)
        (folder / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT))
        done = subprocess.run(["cmake", "-S", folder, "-B", folder / "build", f"-DTorch_ROOT={folder}/libtorch", *options],
                              capture_output=True, text=True, timeout=100)
        return done.returncode, " ".join((done.stdout + done.stderr).split())


class Versions(unittest.TestCase):
    def test_cmake_accepts_the_tested_versions(self):
        for version in (known_versions()[0], known_versions()[-1]):
            minor = version.split(".")[1]
            status, said = configure(minor)
            self.assertEqual(status, 0, said)
            self.assertIn(f"took 2.{minor}", said)

    def test_cmake_refuses_other_versions_without_the_option(self):
        status, said = configure(99)
        self.assertNotEqual(status, 0)
        minors = ", ".join(version.rsplit(".", 1)[0] for version in known_versions())
        self.assertRegex(said, rf"libtorch 2\.99 in \S+ is not tested, {re.escape(minors)} are: .* -DTESSERA_ANY_TORCH=ON")
        status, said = configure(99, "-DTESSERA_ANY_TORCH=ON")
        self.assertEqual(status, 0, said)
        self.assertIn("took 2.99", said)

    def test_setup_refuses_other_versions_in_one_line(self):
        done = subprocess.run([ROOT / "scripts/setup", "--torch", "2.99"], capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertEqual(done.stderr, f"setup: torch 2.99 is not tested (tested: {' '.join(known_versions())}): for another version use "
                                      "--libtorch DIR and cmake -DTESSERA_ANY_TORCH=ON\n")

    def test_the_readme_names_the_tested_versions(self):
        readme = " ".join((ROOT / "README.md").read_text().split())
        self.assertIn(f"The tested versions of libtorch are {', '.join(known_versions())};", readme)
