//! Nodes of a cluster in an option's value.

use anyhow::bail;

/// The names or ids of `--nodes`, separated by commas, each once.
pub fn parse(list: &str) -> anyhow::Result<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    for name in list.split(',').map(str::trim) {
        if name.is_empty() || names.iter().any(|known| known == name) {
            bail!("--nodes={list}: name each node once, separated by commas");
        }
        names.push(name.to_owned());
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_is_named_once() {
        assert_eq!(parse("a, b").ok(), Some(vec!["a".to_owned(), "b".to_owned()]));
        for wrong in ["a,,b", "a,a", ","] {
            assert!(parse(wrong).is_err_and(|error| error.to_string().contains(wrong)), "{wrong}");
        }
    }
}
