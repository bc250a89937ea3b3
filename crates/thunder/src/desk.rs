//! Answers administrative requests at a node's gateway from the node's store, like a server.

use std::net::SocketAddr;
use std::pin::Pin;

use serde_json::json;
use thunder_access::{Access, Caller};
use thunder_node::agent::{Desk, DeskAnswer};
use thunder_server::{Asker, ask_store_as};

/// The desk of a node's store.
#[derive(Debug)]
pub struct StoreDesk(pub Access);

impl Desk for StoreDesk {
    fn ask<'a>(
        &'a self,
        caller: Caller,
        remote: Option<SocketAddr>,
        method: &'a str,
        path: &'a str,
        body: Vec<u8>,
    ) -> Pin<Box<dyn Future<Output = DeskAnswer> + Send + 'a>> {
        Box::pin(async move {
            let Ok(method) = method.parse() else { return failed("the method is none of HTTP") };
            match ask_store_as(self.0.clone(), Asker { caller, remote }, method, path, body).await {
                Ok((status, kind, body)) => DeskAnswer { status: status.as_u16(), kind, body },
                Err(error) => failed(&error.to_string()),
            }
        })
    }
}

fn failed(why: &str) -> DeskAnswer {
    let error = json!({"message": why, "type": "server_error", "param": null, "code": "store_failed"});
    let body = json!({"error": error}).to_string().into_bytes();
    DeskAnswer { status: 503, kind: "application/json".to_owned(), body }
}
