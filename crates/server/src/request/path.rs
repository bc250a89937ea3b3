//! Parts of a request's path.

use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;

use crate::error::ApiError;

/// The only variable part of a path. A part that is not UTF-8 is refused in the API's own form.
#[derive(Debug)]
pub(crate) struct PathPart(pub String);

impl<S: Send + Sync> FromRequestParts<S> for PathPart {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let part: Result<Path<String>, PathRejection> = Path::from_request_parts(parts, state).await;
        let wrong = |why: PathRejection| ApiError::invalid(format!("the path is malformed: {why}"));
        part.map(|Path(part)| Self(part)).map_err(|why| wrong(why).code("invalid_url"))
    }
}
