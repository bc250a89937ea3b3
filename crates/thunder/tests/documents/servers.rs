//! Commands of the documents that start a server: it starts as written, and answers.

use std::path::Path;
use std::process::Command;

use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;

use crate::shell::{Shell, Started, commands, run_elsewhere};

const HOSTING: &str = include_str!("../../../../docs/hosting.md");
const OPERATIONS: &str = include_str!("../../../../docs/operations.md");
const API: &str = include_str!("../../../../docs/api.md");
/// Other commands of these are run by `documents.rs`.
const ONLY_SERVERS: [&str; 2] =
    [include_str!("../../../../docs/access.md"), include_str!("../../../../README.md")];

fn is_live(server: &Started) -> bool {
    let url = format!("{}/health/live", server.url.replace("0.0.0.0", "127.0.0.1"));
    let output = Command::new("curl").args(["-sSk", "-o", "/dev/null", "-w", "%{http_code}", &url]).output();
    String::from_utf8_lossy(&output.unwrap().stdout) == "200"
}

/// A low-rank adapter of the random model: its queries have 8 heads of 32, its rows 128 columns.
fn make_adapter(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]});
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    let (rows, columns, rank) = (8 * 32, 128, 2);
    let name = |part: &str| format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight");
    let (a, b) = (vec![0x3c; rank * columns * 4], vec![0x3c; rows * rank * 4]);
    let tensors = [("A", vec![rank, columns], &a), ("B", vec![rows, rank], &b)]
        .map(|(part, shape, bytes)| (name(part), TensorView::new(Dtype::F32, shape, bytes).unwrap()));
    safetensors::serialize_to_file(tensors, None, &folder.join("adapter_model.safetensors")).unwrap();
}

#[test]
fn the_servers_of_the_documents_start_as_written() {
    let shell = Shell::new();
    let mut count = 0;
    let only_servers = ONLY_SERVERS.into_iter().flat_map(commands);
    let only_servers = only_servers.filter(|command| command.starts_with("serve "));
    // Keys are made in the order of the hosting guide.
    for command in [HOSTING, OPERATIONS, API].into_iter().flat_map(commands).chain(only_servers) {
        let kind = command.split(' ').next().unwrap();
        if kind == "up" || kind == "cluster" || kind == "model" || run_elsewhere(&command) {
            continue;
        }
        let adapter = shell.folder().join("adapters/sql");
        make_adapter(&adapter);
        let here = shell.with_what_is_here(&command);
        let here = here.replace("/adapters/poems", "/adapters/sql");
        let here = here.replace("/adapters/sql", &adapter.display().to_string());
        count += 1;
        if kind != "serve" {
            // A key that another part of the guide has made is there.
            let is_made = kind == "keys" && shell.run("keys list").contains(here.split(' ').nth(2).unwrap());
            assert!(is_made || shell.run(&here).len() > 10, "thunder {command}");
            continue;
        }
        let server = shell.server(&here);
        assert!(is_live(&server), "thunder {command}: {}", server.url);
        assert_eq!(server.url.starts_with("https"), command.contains("--tls"), "{}", server.url);
    }
    assert!(count >= 13, "{count} commands: code blocks are not where this test looks");
}
