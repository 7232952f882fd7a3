/* Which tiers this build has and this machine can run. __builtin_cpu_supports reads XCR0 too: a virtual machine that shows
 * the AVX-512 flag but masks the registers' state is not believed. AMX tiles need the kernel's permission besides. */
#include "herald.h"

extern const herald_tier herald_tier_portable;
#ifdef HERALD_HAVE_X86
#include <sys/syscall.h>
#include <unistd.h>
extern const herald_tier herald_tier_avx2, herald_tier_avx512;
#ifdef HERALD_HAVE_AVX512BF16
extern const herald_tier herald_tier_avx512bf16;
#endif
#ifdef HERALD_HAVE_AMX
extern const herald_tier herald_tier_amx;
#endif
#endif

/* Best last. */
static const char *const names[] = {"portable", "avx2", "avx512", "avx512bf16", "amx"};

int herald_num_tiers(void) { return (int)(sizeof names / sizeof *names); }
const char *herald_tier_name(int index) { return names[index]; }

const herald_tier *herald_tier_get(int index) {
    switch (index) {
        case 0: return &herald_tier_portable;
#ifdef HERALD_HAVE_X86
        case 1: return &herald_tier_avx2;
        case 2: return &herald_tier_avx512;
#ifdef HERALD_HAVE_AVX512BF16
        case 3: return &herald_tier_avx512bf16;
#endif
#ifdef HERALD_HAVE_AMX
        case 4: return &herald_tier_amx;
#endif
#endif
        default: return NULL;
    }
}

int herald_tier_built(int index) { return herald_tier_get(index) != NULL; }

#ifdef HERALD_HAVE_X86
static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
static int has_avx512bf16(void) {
    return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

/* CPUID leaf 7: AMX-BF16, -TILE and -INT8 are EDX bits 22, 24, 25; XCR0 bits 17 and 18 say that the system saves tiles; permission
 * (Linux 5.16) is asked once per process, before the workers start, and inherited by them. */
static int has_amx(void) {
    static int answer = -1;
    if (answer >= 0) return answer;
    unsigned a, b, c, d, low, high;
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(0), "c"(0));
    if (a < 7) return answer = 0;
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(1), "c"(0));
    if (!(c >> 27 & 1)) return answer = 0; /* OSXSAVE: xgetbv is allowed */
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    if (!(d >> 22 & 1) || (d >> 24 & 3) != 3) return answer = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3) return answer = 0;
    return answer = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18L /* tile data */) == 0;
}
#endif

int herald_tier_usable(int index) {
    if (!herald_tier_built(index)) return 0;
    if (index == 0) return 1;
#ifdef HERALD_HAVE_X86
    __builtin_cpu_init();
#ifdef HERALD_EMULATE
    return has_avx2();
#endif
    switch (index) {
        case 1: return has_avx2();
        case 2: return has_avx512();
        case 3: return has_avx512bf16();
        case 4: return has_avx512bf16() && has_amx();
    }
#endif
    return 0;
}

int herald_is_intel(void) {
#ifdef HERALD_HAVE_X86
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") != 0;
#else
    return 0;
#endif
}

/* Matrix tiles take bf16 KV with head_dim in whole tiles of 32. They hold 16 rows and pay, padded, from 8 on: measured, 8 rows
 * are 1.12 to 1.15 times as fast on them, 12 rows 1.31 to 1.40, 4 rows 0.91 (docs/kernels.md). They round queries and p to bf16:
 * so pv = f32 rules them out, and a single query keeps its fp32 scores where its group does not fill a tile. */
int herald_kind_for(const herald_tier *tier, int queries, int group, int dtype, int head_dim, int pv) {
    int rows = queries * group;
    if (tier->kinds >> HERALD_AMX & 1 && pv != HERALD_PV_F32 && dtype == HERALD_BF16 && head_dim % 32 == 0 &&
        rows >= (queries > 1 ? 8 : 16))
        return HERALD_AMX;
    return rows >= tier->many_from ? HERALD_MANY : HERALD_FEW;
}
