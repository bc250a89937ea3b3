// Each rank writes its own pair and zeros for the others, so the sum over ranks has every pair. A
// column is stored as f32, which is exact up to 2^24.
fn end(row: u32, thread: u32) {
    if (thread < 2u * args.ranks) {
        let number = bitcast<u32>(f32(args.first + columns[0]));
        let own = select(number, values[0], thread % 2u == 1u);
        out[args.to + row * 2u * args.ranks + thread] = select(0u, own, thread / 2u == args.rank);
    }
}
