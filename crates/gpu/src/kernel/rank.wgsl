// The order in which experts are chosen.
fn rank_of(row: u32, expert: u32, score: f32) -> f32 {
    if (args.correction == 1u) { return score + correction[expert]; }
    return score;
}
