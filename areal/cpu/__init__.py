"""What makes vLLM and DeepSpeed run, and run fast, on machines without a GPU. With one, only `use_avx512` is called."""
