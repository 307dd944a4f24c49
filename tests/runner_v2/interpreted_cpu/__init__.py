"""A backend "cpu" of Triton that compiles nothing. vLLM's build for CPUs asks for one of this name before it uses its
Triton kernels; with TRITON_INTERPRET=1 they run in numpy. The folder beside this one registers it; both need only be on
the path."""
