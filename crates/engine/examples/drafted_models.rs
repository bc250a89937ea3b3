//! Writes models to measure drafts with, where no real ones can be had: made of the built-in model,
//! slower, with draft models and layers for multi-token prediction that are right always, now and
//! then, or never. `bench/speculation.py` takes them.
//!
//!     cargo run --release -p thunder-engine --example drafted_models -- FOLDER

#[allow(clippy::unwrap_used, reason = "a model that cannot be written is the end")]
#[allow(dead_code, reason = "the tests need more of it")]
#[path = "../tests/engine/models.rs"]
mod models;

use std::path::PathBuf;

use models::Kind;

/// Layers of the served models. All except the built-in model's own layers add nothing.
const THICK: usize = 48;

fn main() -> std::io::Result<()> {
    let Some(folder) = std::env::args_os().nth(1).map(PathBuf::from) else {
        return Err(std::io::Error::other("name the folder to write the models to"));
    };
    std::fs::create_dir_all(&folder)?;
    let written = [
        ("thick", models::thick(THICK)),
        ("draft-right", models::first_layers(models::LAYERS)),
        ("draft-sometimes", models::first_layers(models::LAYERS - 1)),
        ("draft-wrong", models::random()),
        ("layer-right", models::ahead(THICK, Kind::Right)),
        ("layer-sometimes", models::ahead(THICK, Kind::Sometimes)),
        ("layer-wrong", models::ahead(THICK, Kind::Wrong)),
    ];
    for (name, model) in written {
        let target = folder.join(name);
        std::fs::create_dir_all(&target)?;
        for file in std::fs::read_dir(model.path())? {
            let file = file?;
            std::fs::copy(file.path(), target.join(file.file_name()))?;
        }
        println!("{}", target.display());
    }
    Ok(())
}
