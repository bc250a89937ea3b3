/* Times MPI_Allreduce the way thunder-collectives' `comm` example does: the slowest rank's median and p99, one JSON
   object a line. Arguments: f32 | bf16, milliseconds per size, sizes in bytes. bf16 has a user-defined operation,
   since MPI has no such type. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void add_bf16(void *in, void *inout, int *count, MPI_Datatype *type) {
    (void)type;
    uint16_t *a = in, *b = inout;
    for (int i = 0; i < *count; i++) {
        uint32_t x = (uint32_t)a[i] << 16, y = (uint32_t)b[i] << 16, bits;
        float fx, fy, sum;
        memcpy(&fx, &x, 4);
        memcpy(&fy, &y, 4);
        sum = fx + fy;
        memcpy(&bits, &sum, 4);
        b[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc < 4) MPI_Abort(MPI_COMM_WORLD, 2);
    int is_bf16 = strcmp(argv[1], "bf16") == 0;
    double seconds = atof(argv[2]) / 1e3;
    MPI_Op add;
    MPI_Op_create(add_bf16, 1, &add);
    for (int arg = 3; arg < argc; arg++) {
        long bytes = atol(argv[arg]);
        int count = (int)(bytes / (is_bf16 ? 2 : 4));
        void *data = calloc(1, bytes ? bytes : 1);
        MPI_Datatype type = is_bf16 ? MPI_UINT16_T : MPI_FLOAT;
        MPI_Op op = is_bf16 ? add : MPI_SUM;
        double start = MPI_Wtime();
        for (int i = 0; i < 5; i++) MPI_Allreduce(MPI_IN_PLACE, data, count, type, op, MPI_COMM_WORLD);
        double each = (MPI_Wtime() - start) / 5, wanted = seconds / (each > 1e-9 ? each : 1e-9);
        long calls = wanted < 5 ? 5 : wanted > 20000 ? 20000 : (long)wanted;
        MPI_Bcast(&calls, 1, MPI_LONG, 0, MPI_COMM_WORLD);
        double *times = malloc(calls * sizeof *times);
        MPI_Barrier(MPI_COMM_WORLD);
        for (long i = 0; i < calls; i++) {
            start = MPI_Wtime();
            MPI_Allreduce(MPI_IN_PLACE, data, count, type, op, MPI_COMM_WORLD);
            times[i] = (MPI_Wtime() - start) * 1e6;
        }
        qsort(times, calls, sizeof *times, compare);
        double mine[3] = {times[(long)((calls - 1) * 0.5)], times[(long)((calls - 1) * 0.99)], times[0]}, all[3];
        MPI_Reduce(mine, all, 3, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0)
            printf("{\"bytes\":%ld,\"median_us\":%.3f,\"p99_us\":%.3f,\"min_us\":%.3f}\n", bytes, all[0], all[1], all[2]);
        free(times);
        free(data);
    }
    MPI_Finalize();
    return 0;
}
