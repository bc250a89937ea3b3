// cap * tanh(score / cap). tanh(x) is 1 - 2 / (e^2x + 1), which is right where e^2x is infinite.
fn capped(score: $KIND) -> $KIND {
    return $KIND(args.cap) - $KIND(2.0 * args.cap) / (exp(score * (2.0 / args.cap)) + $KIND(1.0));
}
