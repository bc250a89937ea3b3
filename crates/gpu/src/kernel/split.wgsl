// Tokens of a split, for a row that attends to the tokens from `visible` to before `end`: enough for
// $SPLITS splits. It depends on the row alone, so the row's result does not depend on the batch.
fn tokens_of_split(visible: u32, end: u32) -> u32 {
    return max($LEASTu, (end - visible + $SPLITSu * 32u - 1u) / ($SPLITSu * 32u) * 32u);
}
