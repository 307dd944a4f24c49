"""Makes vLLM and DeepSpeed run, and run fast, on machines without a GPU. With a GPU, only `use_avx512` is called."""
