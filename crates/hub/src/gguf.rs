//! GGUF files by their names: the files of each model, and its quantization.
//!
//! A repository has its model once for each quantization: as `NAME-Q4_K_M.gguf`, or, if it is
//! large, as `NAME-Q4_K_M-00001-of-00003.gguf` and so on, sometimes in a folder.

use std::path::{Path, PathBuf};

/// The files of one model, relative to the repository or folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GgufModel {
    /// The name without part number and ending.
    stem: String,
    /// All parts, in order.
    pub(crate) files: Vec<String>,
    /// Number of parts, according to the names.
    parts: usize,
}

impl GgufModel {
    /// The end of the name, such as `Q4_K_M`.
    pub(crate) fn quantization(&self) -> &str {
        let name = self.stem.rsplit('/').next().unwrap_or(&self.stem);
        name.rsplit(['-', '.']).next().unwrap_or(name)
    }

    /// The number of a missing part.
    pub(crate) fn missing_part(&self) -> Option<String> {
        let is_there = |number: usize| self.files.iter().any(|file| part_of(file).1 == number);
        let missing = (1..=self.parts).find(|number| !is_there(*number))?;
        Some(format!("{}-{missing:05}-of-{:05}.gguf", self.stem, self.parts))
    }

    fn is(&self, quantization: &str) -> bool {
        let (name, wanted) = (self.stem.to_ascii_uppercase(), quantization.to_ascii_uppercase());
        name.strip_suffix(&wanted)
            .is_some_and(|before| before.is_empty() || before.ends_with(['-', '.', '_', '/']))
    }
}

/// Why no model could be chosen.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// No model has this quantization. Contains the existing ones.
    None(Vec<String>),
    /// Several models fit.
    Several(Vec<String>),
}

/// True if a file's name is that of a GGUF file.
pub(crate) fn is_gguf(name: impl AsRef<Path>) -> bool {
    name.as_ref().extension().is_some_and(|end| end == "gguf")
}

/// Stem, number and count of a file's name; 1 of 1 if the model is not split.
fn part_of(file: &str) -> (&str, usize, usize) {
    const DIGITS: usize = 5;
    let stem = file.strip_suffix(".gguf").unwrap_or(file);
    let digits = |text: &str| {
        let valid = text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
        valid.then(|| text.parse().ok()).flatten()
    };
    let split = || {
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (name, number) = rest.rsplit_once('-')?;
        let (number, count) = (digits(number)?, digits(count)?);
        (number >= 1 && number <= count).then_some((name, number, count))
    };
    split().unwrap_or((stem, 1, 1))
}

/// The models among files. Projectors of images (`mmproj`) are not models.
pub(crate) fn models<'a>(files: impl Iterator<Item = &'a str>) -> Vec<GgufModel> {
    let mut sorted: Vec<&str> = files
        .filter(|file| is_gguf(file) && !file.rsplit('/').next().unwrap_or(file).starts_with("mmproj"))
        .collect();
    sorted.sort_unstable();
    let mut models: Vec<GgufModel> = Vec::new();
    for file in sorted {
        let (stem, _, parts) = part_of(file);
        match models.iter_mut().find(|model| model.stem == stem && model.parts == parts) {
            Some(model) => model.files.push(file.to_owned()),
            None => models.push(GgufModel { stem: stem.to_owned(), files: vec![file.to_owned()], parts }),
        }
    }
    models
}

/// The model of a quantization, or the only model.
pub(crate) fn choose(models: &[GgufModel], quantization: Option<&str>) -> Result<GgufModel, Choice> {
    let names = |models: &[&GgufModel]| models.iter().map(|model| model.quantization().to_owned()).collect();
    let all: Vec<&GgufModel> = models.iter().collect();
    let fitting: Vec<&GgufModel> = match quantization {
        Some(wanted) => all.iter().copied().filter(|model| model.is(wanted)).collect(),
        None => all.clone(),
    };
    // `NAME-Q4_K_XL` rather than `NAME-UD-Q4_K_XL`.
    let shortest = fitting.iter().map(|model| model.stem.len()).min().unwrap_or_default();
    let mut best = fitting.iter().filter(|model| quantization.is_none() || model.stem.len() == shortest);
    match (best.next(), best.next()) {
        (None, _) => Err(Choice::None(names(&all))),
        (Some(model), None) => Ok((*model).clone()),
        (Some(_), Some(_)) => Err(Choice::Several(names(&fitting))),
    }
}

/// All files of the model at a path: all parts of a split model.
pub fn gguf_parts(path: &Path) -> Vec<PathBuf> {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return vec![path.to_owned()] };
    let (stem, _, count) = part_of(name);
    match count {
        1 => vec![path.to_owned()],
        _ => (1..=count)
            .map(|number| path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.gguf")))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: [&str; 9] = [
        "mmproj-F16.gguf",
        "Qwen3-8B-Q4_K_M.gguf",
        "Qwen3-8B-IQ4_XS.gguf",
        "Qwen3-8B-UD-Q4_K_XL.gguf",
        "Q8_0/Qwen3-8B-Q8_0-00002-of-00002.gguf",
        "Q8_0/Qwen3-8B-Q8_0-00001-of-00002.gguf",
        "BF16/Qwen3-8B-BF16-00001-of-00003.gguf",
        "README.md",
        "qwen3.Q2_K.gguf",
    ];

    fn chosen(quantization: Option<&str>) -> Result<Vec<String>, Choice> {
        choose(&models(FILES.into_iter()), quantization).map(|model| model.files)
    }

    #[test]
    fn a_quantization_names_the_files_of_one_model() {
        assert_eq!(chosen(Some("Q4_K_M")).expect("there"), ["Qwen3-8B-Q4_K_M.gguf"]);
        assert_eq!(chosen(Some("q4_k_xl")).expect("there"), ["Qwen3-8B-UD-Q4_K_XL.gguf"]);
        assert_eq!(chosen(Some("Q2_K")).expect("there"), ["qwen3.Q2_K.gguf"]);
        let parts = ["Q8_0/Qwen3-8B-Q8_0-00001-of-00002.gguf", "Q8_0/Qwen3-8B-Q8_0-00002-of-00002.gguf"];
        assert_eq!(chosen(Some("Q8_0")).expect("there"), parts);
        let Err(Choice::None(there)) = chosen(Some("Q4_XS")) else { panic!("IQ4_XS is another one") };
        assert!(there.contains(&"IQ4_XS".to_owned()) && !there.iter().any(|name| name.contains("mmproj")));
        assert!(matches!(chosen(None), Err(Choice::Several(_))));
    }

    #[test]
    fn a_missing_part_is_named() {
        let model = choose(&models(FILES.into_iter()), Some("BF16")).expect("there");
        assert_eq!(model.missing_part().as_deref(), Some("BF16/Qwen3-8B-BF16-00002-of-00003.gguf"));
        assert_eq!(choose(&models(FILES.into_iter()), Some("Q8_0")).expect("there").missing_part(), None);
    }

    #[test]
    fn all_parts_follow_from_one() {
        let parts = gguf_parts(Path::new("/m/a-00002-of-00003.gguf"));
        assert_eq!(parts.len(), 3);
        assert_eq!(parts[0], Path::new("/m/a-00001-of-00003.gguf"));
        assert_eq!(gguf_parts(Path::new("/m/a.gguf")), [Path::new("/m/a.gguf")]);
    }
}
