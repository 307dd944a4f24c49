/* PyTorch multiplies fp32 matrices with Intel's MKL, which asks this function whether the processor is Intel's. On any
 * other it uses AVX2 only, half of what an AMD processor with AVX-512 can do. `processor.py` loads this file before
 * torch, so that MKL finds it in place of its own function. */

#if defined(__x86_64__)
int mkl_serv_intel_cpu_true(void) {
    return __builtin_cpu_is("intel") || __builtin_cpu_supports("avx512f");
}
#endif
