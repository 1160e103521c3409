# Headers of version 0.2 whose declarations have moved to other headers. For version 0.3 a file of
# the old name includes all of Tessera; it is generated here, and installed beside the others.
set(TESSERA_RENAMED_HEADERS
  checkpoint/adapter checkpoint/async_save checkpoint/find_step checkpoint/runs checkpoint/stateful
  comm/fake_world comm/run_main core/atomic_file core/end_program core/input_file core/keep_freed_memory
  core/nearest core/op_call core/rule_builder core/stop_signals core/text data/fingerprint data/json_lines
  data/prefetch_loader data/prompt_completions data/samples data/stream_decoder data/token_source
  dtensor/manual_seed dtensor/redistribute_options dtensor/visualize fsdp/collectives fsdp/forward_method
  nn/activation_checkpointing nn/attention nn/attention_kernel nn/causal_attention nn/child nn/containers
  nn/context_parallel nn/distribute_module nn/dropout nn/embedding nn/fp8 nn/fqn_pattern nn/freeze
  nn/fused_linear nn/linear nn/lora nn/meta_device nn/mlp nn/norm nn/visit_modules observe/device
  observe/flops observe/measured_peak observe/memory observe/sharding_table observe/step_trace
  observe/tensor_memory optim/ema optim/lr_schedule optim/optimizer_list optim/sgd planning/estimate
  planning/search planning/step_time tensor_parallel/block_plans tensor_parallel/declared_plan
  tensor_parallel/linear_cross_entropy tensor_parallel/plan_table tensor_parallel/style_helpers
  training/evaluation training/metric_log training/run_names training/same_options training/step_meter
  training/stop training/train_state)
set(TESSERA_RENAMED_DIR ${PROJECT_BINARY_DIR}/renamed)

foreach(name IN LISTS TESSERA_RENAMED_HEADERS)
  file(CONFIGURE OUTPUT ${TESSERA_RENAMED_DIR}/tessera/${name}.h @ONLY CONTENT
    "// Deprecated: the declarations are in other headers now.\n#pragma once\n#include \"tessera/tessera.hpp\"\n")
endforeach()
