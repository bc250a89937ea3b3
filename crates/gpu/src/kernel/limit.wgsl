// cap * tanh(value / cap), or the value without a cap.
fn limited(value: f32) -> f32 {
    if (args.cap == 0.0) { return value; }
    return args.cap - 2.0 * args.cap / (exp(value * (2.0 / args.cap)) + 1.0);
}
