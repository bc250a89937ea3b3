fn end(row: u32, thread: u32) {
    if (thread == 0u) { out[args.to + row] = columns[0]; }
}
